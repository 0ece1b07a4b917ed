"""``--from trainer``: arguments of Hugging Face's Trainer as a plan.

A JSON or YAML mapping as ``TrainingArguments.to_dict`` writes it or the example scripts take it, or a shell script that
starts such a script: keys of ``training_args.py`` (transformers 5.23), and those of the scripts' model and data
arguments that are known. ``fsdp`` and ``deepspeed`` shard the model as the Trainer has Accelerate do it. How many GPUs
there are a mapping does not say: more than one (``--gpus``) are assumed to be started by a launcher, as ``ddp``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

from ...frameworks import ROOMS as FRAMEWORKS, framework
from ...plan.errors import ABSENT, Guesses, Node, PlanError, guessed, nearest, shown, together, wrong_at
from ...plan.normalise import normalised
from ...plan.notes import Note
from ...plan.read import SAVED, ReadPlan, Source
from ...plan.text import folder_of, parse_yaml, path_of
from ...plan.training_loops import TRAINING_LOOPS, TRANSFORMERS
from ..accelerate import ds_file, file_named, mixed, shard, sharding_keys, with_precision, without_reentrance
from ..deepspeed.reader import ds_config_in
from ..elsewhere import ELSEWHERE
from ..elsewhere_commands import OF_SCRIPTS
from ..in_flags import in_flags, started_as
from ..launch import Asked, Launch, left_out
from ..launchers import SEVERAL
from ..recognised import is_python, is_script, source_at
from ..settings import Building, Keys, Reader, read_rows
from . import axolotl, llama_factory, swift
from .arguments import EVALUATION_OF_LOSS, Arguments, with_mappings
from .examples import said_by
from .keys import IDLE_BESIDE, LOADED_BY, NOTED, OF_OWN_LOOPS, READ, REFUSED, WITHOUT_EFFECT
from .pins import pinned_by, told_by_keys, told_of
from .python import script_in
from .script import Started, started, with_launcher
from .table import OPTIMIZER, PRECISION, ROWS, as_taken, autocast, check_split, loaded_in, plain
from .trl import Loop, as_loaded, loop_of, named_by_folder, named_by_keys, of_release


def read(place: str, asked: Asked) -> Launch:
    """The plan in the arguments at ``place``. A model and a number of GPUs that they do not name are flags."""
    return launched(started_at(place, asked), asked)


def started_at(place: str, asked: Asked) -> Started:
    """The arguments in the mapping or the script at ``place``, and what stands in front of them."""
    found = _started_at(place, asked)
    return found if place == "-" else replace(found, pins=pinned_by(place, found.folder))


def _started_at(place: str, asked: Asked) -> Started:
    text, name = source_at(place)
    folder = Path() if place == "-" else folder_of(path_of(place))
    if is_script(text, name):
        return started(text, name, folder, asked)
    if is_python(name):
        said = script_in(text, name, asked.names)
        found = Started(said.arguments, folder, script=said.script, environment=said.environment)
        return with_launcher(found, by_trl=False)
    return with_launcher(Started(parse_yaml(text.expandtabs(2), name), folder))


def launched(found: Started, asked: Asked) -> Launch:
    """The plan of what is started."""
    written = found.arguments
    if not isinstance(written.value, dict):
        raise wrong_at(written.origin, "must be a mapping of TrainingArguments")
    if written.mapping.keys() & {"framework", "extends", "layout", "batch"}:
        raise wrong_at(written.origin, "is a plan, not TrainingArguments; leave out --from")
    written = with_mappings(written)
    dialects = (llama_factory, axolotl, swift) if found.said is None else ()
    dialect = next((one for one in dialects if written.mapping.keys() & {*one.MARKS}), None)
    starts = found.script
    if dialect is not None:
        starts = dialect.starts(written) if hasattr(dialect, "starts") else ""
        given = written
        is_whole = found.accelerate is None or not found.accelerate.shards
        written = dialect.translated(written, is_whole=is_whole, processes=_processes(found, asked))
        found = replace(found, arguments=written, script="")
    if (inner := written.mapping.get("model_init_kwargs")) is not None and isinstance(inner.value, dict):
        kept = {key: node for key, node in written.mapping.items() if key != "model_init_kwargs"}
        written = Node({**inner.mapping, **kept}, written.origin)
    if found.said is None and dialect is None and found.script:
        _check_elsewhere(found, written)
    if found.said is None:
        written = said_by(found.called, written, asked)
    if found.accelerate is not None and (dtype := mixed(found.accelerate.precision)) is not None:
        written = _in_precision(written, dtype)
    by_folder = "" if found.script or "trainer" in asked.names else named_by_folder(found.folder, written)
    open_still = dialect is None and not (found.script or by_folder or "trainer" in asked.names)
    by_key = named_by_keys(written) if open_still else ""
    loop = loop_of(starts or by_folder or (by_key and "sft"), written, asked)
    written = loop.with_defaults(written, asked)
    _refuse(written)
    written = of_release(written, asked)
    written = as_loaded(written, loop, asked) if dialect is None else written
    written = as_taken(written, asked.flags.get("model"))
    building = Building(written.origin)
    reader = Reader(Arguments(written.mapping, written.origin), building, asked.names)
    unread = tuple(_unread(written, found, dialect, strict=asked.strict)) if loop.name in TRAINING_LOOPS else ()
    if found.said is not None and found.said.wrong is not None:
        raise found.said.wrong
    if _processes(found, asked) > 1 or found.on_all or "dp" in asked.names:
        check_split(reader.settings)
    if found.gpus is not None and not asked.names & {"gpus", "dp"}:
        building.put("hardware.gpus", found.gpus)
    if found.environment:
        building.put("environment", Node(dict(found.environment), written.origin))
    if loop.own_loss:
        building.put("trainer.loop", loop.name)
    engine = _engine(found, reader.settings, asked)
    read_rows(ROWS, reader)
    if found.accelerate is not None and found.accelerate.compiler is not None:
        found.accelerate.compiler.put(building)
    sections = framework(engine).supports.sections if engine in FRAMEWORKS else ()
    run_by = next((run for section, run in _RUN_BY.items() if section in sections), _by_itself)
    launch = run_by(replace(found, loop=loop), reader, asked)
    told = [*(getattr(dialect, "TOLD", ())), *building.notes]
    if by_key:
        told.append(
            (
                "trainer-assumed",
                f"the trainer is sft: {by_key} is trl's, and no key is of another one; or say --trainer",
            )
        )
    if by_folder:
        told.append(
            ("trainer-assumed", f"the trainer is {by_folder}, as the file's folder is called; or say --trainer")
        )
    pins = {} if "versions" in asked.names else found.pins
    of_releases = told_of(pins, TRAINING_LOOPS.get(loop.name, TRANSFORMERS))
    if dialect is None and not ("versions" in asked.names or "trl" in pins):
        of_releases += told_by_keys(written.mapping, TRAINING_LOOPS.get(loop.name, TRANSFORMERS))
    told_all = (*found.notes, *unread, *(Note(*note) for note in told), *of_releases)
    finish = launch.finish
    if dialect is not None and hasattr(dialect, "check"):
        finish = partial(_checked, launch.finish, partial(dialect.check, given))
    return replace(launch, notes=(*told_all, *launch.notes), finish=finish)


def _checked(finish: Callable[[ReadPlan], ReadPlan], check: Callable[[ReadPlan], ReadPlan], read: ReadPlan) -> ReadPlan:
    return check(finish(read))


def _in_precision(written: Node, dtype: Node) -> Node:
    """The launcher's ``mixed_precision`` counts unless the arguments ask for one (``TrainingArguments`` reads
    ``ACCELERATE_MIXED_PRECISION``, and hands it to Accelerate)."""
    if any(node is not None and node.value is True for node in map(written.mapping.get, ("bf16", "fp16"))):
        return written
    return written.with_items({str(dtype.value): Node(True, dtype.origin)})


def _processes(found: Started, asked: Asked) -> int:
    """Processes that the launcher or a flag says."""
    flag = asked.flags.get("gpus")
    said = int(flag) if isinstance(flag, str) and flag.isdecimal() else found.gpus.value if found.gpus else 1
    return said if isinstance(said, int) and said > 0 else 1


# -- who runs the model ------------------------------------------------------------------------------------


def _engine(found: Started, arguments: Arguments, asked: Asked) -> str:
    """The framework: a flag's, that of the arguments, or of Accelerate's configuration; empty where none is said."""
    named = asked.flags.get("framework")
    if isinstance(named, str):
        return named
    launcher = found.accelerate
    said = [(name, name, node) for name in ("deepspeed", "fsdp") if (node := arguments.asked(name)) is not None]
    if launcher is not None and launcher.shards:
        said.append((launcher.framework, "distributed_type", launcher.kind))
    for name, key, node in said[1:]:
        other, before, first = said[0]
        if name != other:
            where = f"{before} = {shown(first.plain())} at {first.origin} asks for {other}"
            raise node.wrong(key, f"asks for {name}, and {where}; leave one out, or choose with --framework")
    return said[0][0] if said else launcher.framework if launcher is not None else ""


def _by_itself(found: Started, reader: Reader, asked: Asked) -> Launch:
    """One process for each GPU, with the Trainer's own loop; the model is whole in each."""
    building = reader.building
    _framework(found, reader, asked)
    read_rows((*PRECISION, *OPTIMIZER), reader)
    building.put("trainer.loop", found.loop.name)
    read_rows(found.loop.rows, reader)
    return _launch(building)


def _launch(building: Building) -> Launch:
    return Launch(Source(normalised(building.plan()), Path()), ())


def _sharded(found: Started, reader: Reader, asked: Asked) -> Launch:
    """``fully_shard``: FSDP 2 is the default from transformers 5 on (``_process_fsdp_args``), not of Accelerate."""
    arguments: Arguments = reader.settings
    building = reader.building
    building.put("framework", "fsdp")
    configured = arguments.node("fsdp_config") or Node({}, arguments.origin)
    if isinstance(configured.value, str):
        configured = file_named(configured, found.folder, "fsdp_config", "the configuration of FSDP")
    given, newest = sharding_keys(configured), 2
    if found.accelerate is not None and found.accelerate.fsdp is not None and not arguments.asks("fsdp"):
        given, newest = found.accelerate.fsdp, 1
    options = arguments.node("fsdp")
    words = str(options.value).split() if options is not None and isinstance(options.value, str) else []
    legacy = dict(_legacy(words, options)) if options is not None else {}
    dtype = autocast(arguments) or (found.accelerate.precision if found.accelerate is not None else None)
    loaded = loaded_in(arguments) or Node("fp32", arguments.origin)
    unsaid = loaded.value == SAVED or loaded_in(arguments) is None
    adapted = ("lora.rank" in building.items or "lora-rank" in asked.names) and unsaid
    keys = Keys({**legacy, **given.given}, given.origin)
    shard(building, keys, dtype, loaded, asked, newest=newest, adapted=adapted)
    if "quantisation.kind" in building.items and "quantisation.storage" not in building.items:
        building.put("quantisation.storage", Node("uint8", arguments.where("load_in_4bit")))
    read_rows(OPTIMIZER, reader)
    read_rows(found.loop.rows if found.loop.own_loss else EVALUATION_OF_LOSS, reader)
    _tell_padding(found.loop, reader)
    return _launch(building)


def _legacy(words: list[str], origin: Node) -> Iterator[tuple[str, Node]]:
    """``full_shard auto_wrap offload`` as keys of ``fsdp_config`` (``_apply_legacy_fsdp_to_config``)."""
    for word in words:
        if word == "offload":
            yield "cpu_offload", Node(True, origin.origin)
        elif word not in ("auto_wrap", "true", "True"):
            yield "reshard_after_forward", Node(word, origin.origin)


def _by_deepspeed(found: Started, reader: Reader, asked: Asked) -> Launch:
    """DeepSpeed, with what the Trainer fills in for ``auto`` (``integrations/deepspeed.py``,
    ``trainer_config_process``)."""
    arguments: Arguments = reader.settings
    building = reader.building
    without_reentrance(building)
    given = arguments.node("deepspeed")
    if given is not None:
        config = ds_file(given, found.folder)
    elif found.accelerate is not None and found.accelerate.deepspeed is not None:
        config = found.accelerate.deepspeed
    else:
        problem = "is missing: the path to a ds_config.json, or what stands in it"
        raise PlanError("deepspeed", ABSENT, problem, origin=arguments.origin)
    precision = found.accelerate.precision if found.accelerate is not None else None
    config = with_precision(config, autocast(arguments) or precision)
    _check_cast(config, arguments, asked)
    filled = {"gradient_accumulation_steps": building.items.get("batch.accumulation")}
    for name, (flag, path) in _MATCHED.items():
        _check_match(config.mapping.get(name), name, flag, building.items.get(path))
    config = config.with_items(
        {
            name: node
            for name, node in filled.items()
            if node is not None and config.mapping.get(name, Node("auto", config.origin)).value == "auto"
        }
    )
    section = config.mapping.get("optimizer")
    if section is None or section.value is None:
        read_rows(OPTIMIZER, reader)
        way = building.items.get("optimizer.implementation")
        if way is not None and (way.value == "fused" or _offloads(config)):
            # Accelerate makes it DeepSpeed's own under offload (map_pytorch_optim_to_deepspeed); beside PyTorch's fused
            # kernel it takes as much memory otherwise.
            del building.items["optimizer.implementation"]
    read_rows(found.loop.rows if found.loop.own_loss else EVALUATION_OF_LOSS, reader)
    _tell_padding(found.loop, reader)
    return ds_config_in(config, asked, building)


def _tell_padding(loop: Loop, reader: Reader) -> None:
    """Where the Trainer's loop is the engine's, whose plans do not say whose batches they are; not where checkpoints
    keep one mask, of less than half a gibibyte."""

    def said(path: str) -> object:
        node = reader.building.items.get(path)
        return None if node is None else node.value

    batch, length = said("batch.mbs"), said("batch.seq")
    sdpa = said("attention") in (None, "sdpa")
    if not isinstance(batch, int) or batch == 1 or not sdpa or loop.own_loss:
        return
    is_small = said("recompute.mode") == "full" and isinstance(length, int) and 4 * batch * length**2 < 2**30
    if not (is_small or {"attention", "mbs", "padding"} & reader.context):
        reader.building.note(
            "padding",
            "every sequence is assumed to be full, as after packing: if your micro-batches are padded, sdpa gets a "
            "mask, and the attention of each layer keeps it, with repeated keys and values; add --padding to count it",
        )


def _check_cast(config: Node, arguments: Arguments, asked: Asked) -> None:
    """Refuses a model that is loaded in 16 bits where nothing tells the engine so: it stays so, beside an optimizer for
    fp32 (``get_data_types`` of DeepSpeed's ``runtime/engine.py``)."""
    loaded, on = loaded_in(arguments), [config.at(f"{name}.enabled") for name in ("bf16", "fp16")]
    if "dtype" in asked.names or loaded is None or loaded.value not in ("bf16", "fp16"):
        return
    if any(node is not None and node.value is True for node in on):
        return
    raise loaded.wrong(
        "dtype",
        f"must be float32 where neither the arguments nor DeepSpeed's configuration enable {loaded.value}: the engine "
        f"keeps such a model, with gradients of it in fp32, which is not modelled; enable it ({loaded.value}: true, "
        f"or --dtype {loaded.value})",
    )


_MATCHED: Mapping[str, tuple[str, str]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", "batch.mbs"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", "batch.accumulation"),
}
"""Keys of a ``ds_config.json`` that must be what the Trainer's arguments say: which, and the plan's field."""


def _check_match(given: Node | None, name: str, flag: str, trainers: Node | None) -> None:
    """transformers stops where the file and its own arguments say two things (``fill_match``)."""
    if trainers is not None and given is not None and given.value not in ("auto", trainers.value):
        raise given.wrong(
            name,
            f"must be auto or {trainers.value}, which the Trainer's {flag} is, by default or as given: "
            f"transformers stops where they differ; its script takes --{flag} {given.plain()}",
        )


def _offloads(config: Node) -> bool:
    device = config.mapping.get("zero_optimization", config).at("offload_optimizer.device")
    return device is not None and device.value not in (None, "none")


_RUN_BY: Mapping[str, Callable[[Started, Reader, Asked], Launch]] = {"fsdp": _sharded, "deepspeed": _by_deepspeed}
"""By the section of a plan that the framework reads; the Trainer's own loop for one that reads neither."""


# -- arguments ---------------------------------------------------------------------------------------------


def _refuse(written: Node) -> None:
    wrong = [
        PlanError(key, plain(node), f"must be left out: {why}", origin=node.origin)
        for key, (harmless, why) in REFUSED.items()
        if (node := written.mapping.get(key)) is not None and node.plain() not in harmless
    ]
    if wrong:
        raise together(wrong)


MEANT = {
    **dict.fromkeys(("use_lora", "use_peft_lora"), "use_peft"),
    **dict.fromkeys(("q_lora", "use_qlora", "use_4bit_quantization"), "load_in_4bit"),
    "use_8bit_quantization": "load_in_8bit",
    "use_flash_attn": "attn_implementation",
    "use_nested_quant": "use_bnb_nested_quant",
    "max_seq_len": "max_seq_length",
    "model_name": "model_name_or_path",
    "lora_dim": "lora_r",
}
"""Of scripts that have arguments of their own (FastChat's, Qwen's, peft's): what says the same."""


def _unread(written: Node, found: Started, dialect: ModuleType | None, *, strict: bool) -> Iterator[Note]:
    """Keys that nobody knows, or that change a detail which is not modelled."""
    known = (*READ, *REFUSED, *NOTED, *WITHOUT_EFFECT)
    named = sorted({*known, *getattr(dialect, "KEYS", ())} - {LOADED_BY})
    told = {**NOTED, **getattr(dialect, "NOTED", {})}
    guesses = Guesses(lambda key: MEANT.get(key) or nearest(key, named))
    wrong: list[PlanError] = []
    other = Arguments(written.mapping, written.origin)
    for key, node in written.mapping.items():
        if key in told:
            harmless, assumed = told[key]
            turned_off = any(other.asks(name) for name in IDLE_BESIDE.get(key, ()))
            if turned_off or node.plain() in harmless:
                continue
            code, problem = "argument-not-modelled", f"is not modelled: {assumed}"
        elif key in known or key.startswith("_"):
            continue
        else:
            guess = guesses.of(key)
            if found.said is not None and key in found.said.declared and guess not in (*READ, *REFUSED, *NOTED):
                continue
            code, problem = "argument-unknown", guessed("is no key that is read", guess)
            if guess is not None:  # HfArgumentParser refuses whatever it does not know (parse_dict)
                wrong.append(PlanError(key, plain(node), problem, origin=node.origin))
                continue
        yield left_out(code, key, plain(node), problem, node.origin, strict=strict)
    if found.script and (len(wrong) >= SEVERAL or not OF_OWN_LOOPS.isdisjoint(one.field for one in wrong)):
        names = ", ".join(one.field for one in wrong[:5])
        what = f"starts {found.called}.py, which takes arguments of its own ({names}), and is not the Trainer's"
        raise wrong_at(written.origin, in_flags(OF_SCRIPTS, _beside(written, found), what))
    if wrong:
        raise together(wrong)


def _check_elsewhere(found: Started, written: Node) -> None:
    """Refuses arguments of a script of another tool, some of which the Trainer's are called like."""
    keys = written.mapping.keys() - {"use_slow_tokenizer", "policy"}  # which other scripts have, too
    tool = next((one for one in ELSEWHERE if not keys.isdisjoint(one.marks)), None)
    if tool is not None:
        what = f"starts {found.called}, which is {tool.name}'s and not the Trainer's"
        raise wrong_at(written.origin, in_flags(tool, _beside(written, found), what))


def _beside(written: Node, found: Started) -> Node:
    """``written``, arguments of a script of its own, with what its launcher says."""
    launcher = found.accelerate
    engine = launcher.deepspeed if launcher is not None else None
    stage = engine.at("zero_optimization.stage") if engine is not None else None
    shards = found.by_deepspeed or engine is not None
    called = f"{written.origin.source}/{found.called}"
    return started_as(written, called, by_deepspeed=shards, gpus=found.gpus, stage=stage)


def _framework(found: Started, reader: Reader, asked: Asked) -> None:
    """Who runs the model; on one GPU nobody needs a launcher."""
    names, put = reader.context, reader.building.put
    if "framework" in names:
        return
    if found.on_all and found.gpus is None and not {"gpus", "dp"} & names:
        reader.building.note(
            "gpus-assumed",
            "one GPU, since nothing says how many there are; the launcher starts a process on each that it finds: "
            "--gpus N",
        )
    if found.gpus is not None or found.accelerate is not None:
        put("framework", "ddp" if found.gpus is not None and found.gpus.value != 1 else "single")
        return
    said = next((name for name in ("dp", "gpus") if name in names), "")
    several = bool(said) and asked.flags.get(said) != "1"
    spread = reader.settings.node("device_map")
    if several and spread is not None:
        problem = (
            "spreads the model over all GPUs of one process, which a launcher of several refuses: --framework "
            "device-map is such a process; without device_map there is one on each GPU (--framework ddp)"
        )
        raise PlanError("device_map", spread.plain(), problem, origin=spread.origin)
    put("framework", "ddp" if several else "single")
    if several:
        reader.building.note(
            "launcher-assumed",
            "several GPUs are assumed to be started by torchrun or accelerate launch, one process each (ddp); "
            "without a launcher the Trainer wraps the model in DataParallel, which is not modelled",
        )
