"""The launch scripts of Megatron-LM and Megatron-DeepSpeed: arguments of a training command as a plan.

A shell script, a list of arguments or a mapping of them; each argument is explained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from ..bash.values import Cause, is_known, origin_of, text
from ..plan.environment import is_irrelevant
from ..plan.errors import ABSENT, Guesses, Node, Origin, PlanError, guessed, is_slip, one_line, together, wrong_at
from ..plan.notes import Note
from ..plan.plan import Plan
from ..plan.read import Flags, ReadPlan, Source
from ..plan.spoken import Spoken, Written
from .files import Words, read_words, words_of
from .forks import AS_HERE
from .launch import PUSHES, Asked, Explained, Launch, data_parallel, launched_plan, left_out, with_sizes
from .megatron.context import Context, Family
from .megatron.hybrid import OLDER, PATTERN
from .megatron.layout import BATCH_SCHEDULE
from .settings import Argument, Building, Given, NeededError, Row, Settings, Table, arguments_of, asks, nearest_argument

_KEPT = re.compile(r"NVTE_|PYTORCH_|CUBLAS|CUDA_|TORCH_|NCCL_")
"""Variables of the environment that go into a plan, but for those that change no memory."""
_OTHER_MODELS = re.compile(r"(?<![a-z])(?:ict|vlm|vit|vision|retro|mimo|multimodal|prefix_lm|realm|biencoder)(?![a-z])")

_NO_TRAINING = re.compile(
    r"(?!.*train).*(?:generat|text_gen|inference).*|convert_model|export|mmlu|prune|quantize|validate|offline_feature_\w+"
)
"""Names of scripts that take a training's arguments and run the model alone, or change its weights."""

_IMAGES = ("--img-h", "--patch-dim", "--vision-pretraining")
"""Arguments that mean such a model where no script is named: pretrain_gpt.py takes them and does nothing with them."""


def read(place: str, asked: Asked) -> Launch:
    """The plan in the launch file at ``place``."""
    words = read_words(place, asked.format, asked.variables())
    try:
        return launched(words, asked)
    except PlanError as error:
        if isinstance(error, NeededError):
            error = together([error, *Settings(words.given, words.ledger, words.origin).all_needed()])
        elif not words.unread or not error.problem.startswith("is missing"):
            raise
        raise with_unread(error, words.unread) from None


def with_unread(error: PlanError, unread: Sequence[str]) -> PlanError:
    """``error``, of values that are not known, with the scripts that may set them."""
    *others, last = error.errors
    return together([*others, last.but(problem="; ".join([last.problem, *unread]))])


def read_back(text: str, framework: str, flags: Flags) -> Plan:
    """The plan in the exported script ``text``."""
    asked = Asked(framework, flags)
    return launched_plan(launched(words_of(text, "train.sh", framework, {}), asked), flags).plan


def launched(
    words: Words,
    asked: Asked,
    family: Family | None = None,
    environment: Mapping[str, Node] | None = None,
    name: str = "arguments",
) -> Launch:
    """``words`` as a plan; ``family`` and ``environment`` where the caller knows more than they say. ``name`` is the
    model's where no script's name is."""
    told: tuple[Note, ...] = ()
    if any(one.canonical == "--yaml-cfg" for one in words.given):
        from .megatron.yaml_configuration import in_place_of

        words, told = in_place_of(words, asked.strict)
    settings = Settings(words.given, words.ledger, words.origin)
    table = import_module(f".{asked.format.replace('-', '_')}.table", __package__)
    refused = (
        _of_no_training(words)
        or _of_modelopt(words)
        or (_of_other_model(words) if family is None else None)
        or _refusal(words)
        or _misspelt(words, asked.format)
        or _refused_argument(words, table.FORKS)
    )
    if refused is not None:
        raise refused
    training = words.training
    gpus = asked.gpus or (training.gpus if training is not None else None)
    if gpus is None and not asked.names & {"gpus", "dp"}:
        problem = "is needed: the launch file does not say how many GPUs there are; give it as --gpus N"
        unsaid = training.unsaid if training is not None else None
        raise unsaid or PlanError("hardware.gpus", ABSENT, problem, origin=words.origin)
    context = Context(
        family or _family(words, settings),
        training.script if training is not None else name,
        words.folder,
        gpus,
        training.gpus_per_node if training is not None else None,
        asked.vocabulary,
        words.files,
        {**_environment(words), **(environment or {})},
    )
    building: Building = table.plan_of(settings, context)
    variables = {name: node for name, node in (context.environment or {}).items() if matters(name)}
    if variables:
        building.put("environment", Node(dict(variables), words.origin))
    notes = (
        *told,
        *_argument_notes(words, asked.format, asked.strict),
        *_word_notes(words, asked.strict),
        *(Note(*note) for note in building.notes),
    )
    gbs = building.items.get("batch.gbs")
    spoken = _spoken(words, building, table.ROWS)
    launch = Launch(Source(building.plan(), Path()), tuple(notes), tuple(_explained(words, building)), spoken=spoken)
    if gbs is None or settings.has("--global-batch-size") or settings.has(BATCH_SCHEDULE):
        return launch
    return replace(launch, finish=partial(_one_microbatch, derived=gbs.origin))


def _one_microbatch(read: ReadPlan, derived: Origin) -> ReadPlan:
    """The global batch size that was ``derived``, since nobody gave it, follows the sizes that flags have changed."""
    if read.origins.get("batch.gbs") is not derived or read.plan.hardware.gpus is None:
        return read
    return with_sizes(read, gbs=read.plan.batch.mbs * data_parallel(read))


def _family(words: Words, settings: Settings) -> Family:
    """BERT, T5, a hybrid or GPT, by the training script's name, or else by its decoder, its images or its tokenizer."""
    script = words.training.script if words.training is not None else ""
    if "bert" in script:
        return "bert"
    if "t5" in script or (not script and settings.has("--decoder-num-layers")):
        return "t5"
    pattern = next((name for name in (PATTERN, OLDER) if settings.has(name)), None)
    if re.search(r"mamba|hybrid", script) or (not script and pattern):
        return "hybrid"
    image = None if script else next((name for name in _IMAGES if settings.has(name)), None)
    if image is not None:
        raise settings.wrong(image, "belongs to models that see images, which are not modelled yet")
    if pattern is not None and "gpt" in script:
        raise settings.wrong(
            pattern,
            f"must be left out with {script}.py, which builds GPT's layers; pretrain_hybrid.py builds a hybrid's",
        )
    if pattern is not None:
        return "hybrid"
    tokenizer = settings.loose_word("--tokenizer-type") or ""
    return "bert" if not script and tokenizer.startswith("BertWordPiece") else "gpt"


def _of_other_model(words: Words) -> PlanError | None:
    """An error for a script whose name says that its model sees, hears or retrieves."""
    script = words.training.script if words.training is not None else ""
    if re.search(r"bert|t5|mamba|hybrid", script) or not _OTHER_MODELS.search(script):
        return None
    known = "pretrain_gpt.py, pretrain_bert.py, pretrain_t5.py and pretrain_hybrid.py"
    return wrong_at(words.origin, f"starts {script}.py, whose model is not modelled yet; those of {known} are")


def matters(name: str) -> bool:
    """Whether a variable of the environment may change memory."""
    return bool(_KEPT.match(name)) and not is_irrelevant(name)


def _environment(words: Words) -> dict[str, Node]:
    """Variables of the environment that are known."""
    return {
        name: Node(text(value), origin_of(value, words.origin))
        for name, value in words.environment.items()
        if is_known(value)
    }


def _of_no_training(words: Words) -> PlanError | None:
    """An error for a script that generates text."""
    script = words.training.script if words.training is not None else ""
    if not _NO_TRAINING.fullmatch(script):
        return None
    return wrong_at(
        words.origin, f"starts {script}.py, which trains nothing: there are neither gradients nor optimizer states"
    )


_FINE_TUNES = "finetune"
_TE_LAYERS = "--export-default-te-spec"
_OWN_LAYERS = (
    *("--export-offline-model", "--export-qk-l2-norm", "--export-moe-apply-probs-on-input", "--enable-gpt-oss"),
    *("--freeze-base-for-mtp", "--qad-train-target", "--hybrid-layer-pattern", "--hybrid-override-pattern"),
)


def _of_modelopt(words: Words) -> PlanError | None:
    """An error for ModelOpt's ``finetune.py`` (``examples/post_training/modelopt``) where its layers are not
    Transformer Engine's as ``pretrain_gpt.py`` has them.

    It builds linear layers and experts of Megatron's own (``get_gpt_modelopt_spec``) unless it is told to take
    ``get_gpt_layer_with_transformer_engine_spec``, which then makes each layer, with grouped experts where there are
    any (``modelopt_gpt_hybrid_builder`` of ``megatron/post_training/model_builder.py``).
    """
    script = words.training.script if words.training is not None else ""
    given = {one.canonical: one for one in words.given}
    marks = ("--finetune-", "--export-") if script == _FINE_TUNES else ("--finetune-",)
    if script not in (_FINE_TUNES, "") or not any(name.startswith(marks) for name in given):
        return None
    if _TE_LAYERS not in given:
        return wrong_at(
            words.origin,
            "starts ModelOpt's finetune.py, whose layers are its own (get_gpt_modelopt_spec: linear layers and "
            f"experts of Megatron's), not estimated; with {_TE_LAYERS} they are Transformer Engine's, which are",
        )
    for name in _OWN_LAYERS:
        if name in given:
            problem = f"must be left out with finetune.py: its GPT as {_TE_LAYERS} builds it is estimated, and no other"
            return PlanError(name, ABSENT, problem, origin=given[name].origin)
    with_experts, every = given.get("--num-experts"), given.get("--moe-layer-freq")
    if with_experts is not None and "--moe-grouped-gemm" not in given:
        problem = "is needed with finetune.py, which groups a rank's experts whether it is given or not"
        return PlanError("--moe-grouped-gemm", ABSENT, problem, origin=with_experts.origin)
    if with_experts is not None and every is not None and [*map(text, every.values)] != ["1"]:
        problem = "must be 1 or left out with finetune.py, which gives every layer experts"
        return PlanError(every.name, " ".join(map(text, every.values)), problem, origin=every.origin)
    layers = given.get("--transformer-impl")
    if layers is not None and [*map(text, layers.values)] != ["transformer_engine"]:
        problem = f"must be transformer_engine with {_TE_LAYERS}"
        return PlanError(layers.name, " ".join(map(text, layers.values)), problem, origin=layers.origin)
    return None


def _refusal(words: Words) -> PlanError | None:
    """An error where words that are not known may hold arguments that matter."""
    arguments = {**arguments_of("megatron-deepspeed"), **arguments_of("megatron")}
    for value in words.loose:
        for unknown in words.ledger.unknowns(value):
            if asks(unknown, arguments):
                options = ", ".join(unknown.options[:4]) or "arguments"
                remedy = f"; give it as --set {unknown.ask}=value" if unknown.ask else "; keep the branch that applies"
                verb = "is" if len(unknown.options) == 1 else "are"
                return wrong_at(
                    unknown.origin,
                    f"whether {options} {verb} given depends on {unknown.shown}, which cannot be decided{remedy}",
                )
    return None


def _refused_argument(words: Words, forks: Mapping[str, str]) -> PlanError | None:
    """An error for the first argument under which nothing would be estimated as it is, one of ``forks`` too."""
    for given in {given.canonical: given for given in words.given}.values():
        argument = given.argument
        if argument is None and given.name in forks and [*map(text, given.values)] != [AS_HERE.get(given.name)]:
            return PlanError(given.name, ABSENT, forks[given.name], origin=given.origin)
        if argument is None or _is_default(given, argument):
            continue
        if argument.table is Table.REFUSED:
            return PlanError(given.name, ABSENT, argument.why, origin=given.origin)
        if argument.table is not Table.NOT_MODELLED:
            continue
        direction, _, problem = argument.why.partition(": ")
        if direction == "refused":
            return PlanError(given.name, ABSENT, problem, origin=given.origin)
    return None


def _misspelt(words: Words, framework: str) -> PlanError | None:
    """An error for arguments that look like others which change memory: the parser would not start with them, while
    a fork may have others of its own."""
    guesses = Guesses(lambda name: nearest_argument(name, framework))
    known = arguments_of(framework)
    found: list[PlanError] = []
    for given in words.given:
        guess = guesses.of(given.name) if given.argument is None else None
        meant = [one for one in (guess or "").split(" or ") if one and is_slip(given.name, one)]
        if meant and known[meant[0]].table is not Table.IRRELEVANT:
            problem = guessed(f"is not an argument of {framework}", meant[0])
            found.append(PlanError(given.name, ABSENT, problem, origin=given.origin))
    return together(found) if found else None


def _argument_notes(words: Words, framework: str, strict: bool) -> Iterator[Note]:
    """Arguments that no table has or that are not modelled; errors if ``strict``."""
    last = {given.canonical: given for given in words.given}
    guesses = Guesses(lambda name: nearest_argument(name, framework))
    for given in last.values():
        argument = given.argument
        if argument is None:
            problem = guessed(f"is not an argument of {framework}", guesses.of(given.name))
            code = "argument-unknown"
        elif argument.table is Table.NOT_MODELLED and not _is_default(given, argument):
            direction, _, what = argument.why.partition(": ")
            problem = f"is not modelled yet and {PUSHES[direction]}: {what}"
            code = "argument-not-modelled"
        else:
            continue
        yield left_out(code, given.name, ABSENT, problem, given.origin, strict=strict, told=_shown(given, words))


def _is_default(given: Given, argument: Argument) -> bool:
    if argument.default is None or len(given.values) != 1:
        return False
    value = text(given.values[0])
    if value == argument.default:
        return True
    try:
        return float(value) == float(argument.default)
    except ValueError:
        return False


def _word_notes(words: Words, strict: bool) -> Iterator[Note]:
    """Words that belong to no argument, variables that nobody set, further trainings."""
    plain = [value for value in words.loose if not words.ledger.unknowns(value)]
    if plain:
        several = [words.ledger.shown(value) for value in plain]
        listed = " ".join(several[:8]) + (" …" if len(several) > 8 else "")
        verb = "belongs" if len(several) == 1 else "belong"
        where = origin_of(plain[0], words.origin)
        yield Note("argument-loose", one_line(f"{listed} ({where}) {verb} to no argument"))
    for value in words.loose:
        unknowns = words.ledger.unknowns(value)
        where = origin_of(value, words.origin)
        shown = words.ledger.shown(value)
        if not unknowns:
            continue
        if unknowns[0].cause is Cause.UNSET:
            yield Note("variable-unset", one_line(f"{shown} ({where}) is not set and taken as empty"))
        elif strict:
            raise wrong_at(where, f"{shown} is not known, and arguments may be in it (--strict)")
        else:
            yield Note("argument-loose", one_line(f"{shown} ({where}) is not known; any arguments in it are left out"))
    for name in words.unused:
        problem = f"{name} is nowhere in {words.origin.source}, so that --set {name} changes nothing"
        if strict:
            raise wrong_at("--set", f"{problem} (--strict)")
        yield Note("variable-unused", one_line(problem))
    for what in words.unread:
        yield Note("not-followed", one_line(what))
    unset = _unset(words)
    if unset:
        names = ", ".join(unset[:8]) + (", …" if len(unset) > 8 else "")
        yield Note("variable-unset", one_line(f"not set, and not needed for memory: {names}"))
    yield from words.training.notes if words.training is not None else ()


def _unset(words: Words) -> list[str]:
    found: dict[str, None] = {}
    for given in words.given:
        for value in given.values:
            found.update((unknown.ask or unknown.shown, None) for unknown in words.ledger.unknowns(value))
    return [f"${name}" if re.fullmatch(r"\w+", name) else name for name in found]


def _shown(given: Given, words: Words) -> str:
    return " ".join([given.name, *(words.ledger.shown(value) for value in given.values[:4])])


def _spoken(words: Words, building: Building, rows: Iterable[Row]) -> Spoken:
    """The arguments as the fields that they have become are called; a switch that turns a field off is not called as
    the field."""
    last = {given.canonical: given for given in words.given}

    def written(path: str, names: Iterable[str]) -> tuple[Written, ...]:
        given = [last[name] for name in names if name in last]
        values = [" ".join(words.ledger.shown(value) for value in one.values) or ABSENT for one in given]
        origin = building.items[path].origin
        return tuple(Written(one.name, value, origin) for one, value in zip(given, values, strict=True))

    names = {row.path: row.name for row in reversed([*rows]) if row.path and row.words.get(True, True)}
    return Spoken({path: written(path, said) for path, said in building.said.items()}, names)


def _explained(words: Words, building: Building) -> Iterator[Explained]:
    last = {given.canonical: given for given in words.given}
    for given in words.given:
        argument = given.argument
        value = " ".join(words.ledger.shown(value) for value in given.values)
        origin = origin_of(given.values[0], given.origin) if given.values else given.origin
        if last[given.canonical] is not given:
            became = f"replaced by the one at {last[given.canonical].origin}"
        elif argument is None:
            became = "not an argument of this parser"
        elif argument.table is Table.MODELLED:
            became = ", ".join(dict.fromkeys(building.became.get(argument.name, ["no effect here"])))
        elif argument.table is Table.IRRELEVANT:
            became = argument.why
        elif _is_default(given, argument):
            became = "its default, which does nothing"
        else:
            direction, _, what = argument.why.partition(": ")
            became = f"not modelled yet, {PUSHES.get(direction, direction)}: {what}"
        yield Explained(given.name, value, origin, became, argument.table if argument is not None else None)
