"""Models that people train and that are not built in, by their names on the Hugging Face Hub: what they are made of."""

from __future__ import annotations

import re

_EXPERTS = "its experts"
_SPARSE = "its attention, which picks keys"
_LINEAR = "its linear attention"
_INDEXERS = "its indexers, whose picks layers hand to one another"
_IMAGES = "images that it reads"
_NO_LANGUAGE = "models of anything but text"
_OWN_CODE = "its layers, whose code came with its weights"

_MODELS: tuple[tuple[str, str], ...] = (
    (r"llava|pixtral|smolvlm|idefics|internvl|paligemma|molmo|minicpm-?[ov]|llama-?3\.2-(11|90)b|-vision", _IMAGES),
    (r"-vl(-|$)", _IMAGES),
    (r"gemma-?(3n|4-?e[24]b)", "its layers that share keys and values, each with an embedding; images and sound"),
    (r"glm-4\.[0-9]v|phi-4-multimodal|janus|ovis|kimi-vl|kimi-k2\.[5-9]|gemma-?4", _IMAGES),
    (r"mistral-large-?3|mistral-small-?4|mistral-medium|qwen3\.[5-9]", _IMAGES),
    (r"whisper|voxtral|wav2vec|hubert|audio|-asr|tts|bark|musicgen", "sound that it reads or makes"),
    (r"^(vit|deit|swin|clip|siglip|dino|sam|convnext|resnet)|stable-?diffusion|sdxl|^sd-?[0-9]|flux", _NO_LANGUAGE),
    (r"granite-?4(?!\.[12]|(\.0)?-(micro|1b|350m))", "its layers of Mamba-2 beside attention"),
    (r"jamba|zamba|bamba|falcon-h1|plamo|samba|hymba", "its layers of Mamba beside attention"),
    (r"falcon-?mamba|^mamba-[0-9]", "its layers of the first Mamba (it has one for those of Mamba-2)"),
    (r"lfm-?2", "its short convolutions beside attention"),
    (r"recurrentgemma|rwkv|xlstm|retnet", "its recurrent layers"),
    (r"kimi-linear|minimax-?(m1|text)|^ling-.*(flash|linear)-?2\.5|ring-.*linear", _LINEAR),
    (r"minimax-m3|ernie-4\.5-(21|300)b|hunyuan-?(a|large)|^(ling|ring)-|bailing|trinity|afmoe", _EXPERTS),
    (r"phi-?(3\.5|mini|tiny)-moe|dbrx|arctic|grok|jetmoe|flex-?olmo|longcat|step-?3", _EXPERTS),
    (r"solar-open|exaone-?moe|k-exaone", _EXPERTS),
    (r"deepseek-v4", _SPARSE),
    (r"glm-?5", _INDEXERS),
    (r"exaone-?(3|deep)|internlm|baichuan|chatglm|glm-?[23]-|xverse|^qwen-(1_8|7|14|72)b", _OWN_CODE),
    (r"phi-3-small|orion", _OWN_CODE),
    (r"hunyuan", "its norms of queries and keys behind the rotary embedding"),
    (r"mimo", "its layers that predict further tokens"),
    (r"afm-4\.5b|arcee|nemotron-?4-(15|340)b|nemotron-mini", "its MLP of squared ReLU without a gate"),
    (r"olmo-(1\.7-|7b-0[47]24)", "its queries, keys and values, which are clipped (clip_qkv)"),
    (r"bitnet|falcon-e|1\.58", "its weights of less than two bits"),
    (r"apertus-70b", "its layers"),
    (r"flan-t5|mt5|umt5|^ul2|t5gemma|t5-v1_1|long-?t5|pegasus|mbart|nllb|m2m", "its encoder and decoder"),
    (r"modernbert|deberta|electra|albert|longformer|bigbird|xlnet", "its encoder"),
    (r"^mpt|gpt-neo-[0-9]|codegen|xglm|persimmon|stablelm", "its layers"),
)
"""Regular expressions of the last part of a name, in lower case, and what of the model is not modelled; the first
that is found counts."""


_TRACE = (
    " memplan trace, or memplan trace --learn, runs transformers' code of it on fake tensors (needs torch and "
    "transformers)"
)

LONGEST = 96
"""Letters of a repository's name on the Hub, at most."""


def what_is_missing(name: str) -> str:
    """What of the model called ``name`` is not modelled; empty where nobody here knows that model."""
    own = name.rpartition("/")[2][:LONGEST].lower().replace("_", "-")
    return next((what for pattern, what in _MODELS if re.search(pattern, own)), "")


def why_not(name: str) -> str:
    """That the model called ``name`` is known and not modelled, and what is left to do; empty as above."""
    what = what_is_missing(name)
    if not what:
        return ""
    fetch = f"hf download {name if '/' in name else 'OWNER/NAME'} config.json"
    if what == _IMAGES:
        text = f"with its configuration ({fetch}) its text part is planned, where memplan has a recipe of that"
        return f"reads images, which is not modelled; {text}; if not,{_TRACE}"
    if what == _INDEXERS:
        return f"is known, and not modelled: memplan has no recipe for {what}, and traces none"
    return f"is known, and not modelled: memplan has no recipe for {what}; with its configuration ({fetch}){_TRACE}"
