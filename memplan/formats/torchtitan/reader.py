"""``--from torchtitan``: a job's TOML file, or the JSON that it saved, as a plan.

The configuration that a shell script starts torchtitan with, and what it says over it.

``NGPU=8 CONFIG_FILE=train.toml ./run_train.sh --training.seq_len 4096`` (``run_train.sh`` of torchtitan 0.2), and
``torchrun --nproc_per_node=8 -m torchtitan.train --job.config_file train.toml``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...bash.origin import ScriptError
from ...bash.shell import read_script
from ...bash.starting import beside_the_script
from ...bash.values import Started, Value, is_known, text
from ...frameworks import framework
from ...plan.errors import (
    ABSENT,
    Guesses,
    Node,
    Origin,
    PlanError,
    guessed,
    is_slip,
    one_line,
    refused,
    shown,
    together,
    wrong_at,
)
from ...plan.fields import plan_fields
from ...plan.notes import Note
from ...plan.plan import Plan
from ...plan.read import ReadPlan, Source
from ...plan.text import folder_of, path_of, text_at
from ...values import dataclass
from ..launch import PUSHES, Asked, Explained, Launch, data_parallel, left_out
from ..launchers import beside, found_from, gpus_of, runs_torchtitan
from ..recognised import is_python, is_script
from ..settings import Building, Table, needed, taken_apart
from .keys import NO_TOML, Key, era_of, key_of, keys, nearest_key, read_configuration
from .low_precision import CONVERTERS, adapters_alone, low_keys
from .registry import CONFIG, chosen, found_at, is_registry, place_of, written_in
from .settings import VERSION, Settings, assigned, flat
from .stages import FLEX, PACKED, UNFUSED, VARLEN, stages
from .table import (
    ALL_TOKENS,
    BATCH,
    GLOBAL_BATCH,
    LENGTH,
    LOSS_WHOLE,
    OUTPUTS_DROPPED,
    PP,
    REPLICATE,
    RESHARD,
    ROWS,
    SEQUENCE,
    SHARD,
    TOKENS,
    TP,
    compiled_loss,
    decay_of,
    expert_parts,
    expert_ranks,
    torchtitan_plan,
)

_FILE = "--job.config_file"
_BY_PYTHON = {"--module": ("MODULE", "llama3"), "--config": ("CONFIG", "llama3_debugmodel")}
"""Of torchtitan since its configurations are Python: the variable of ``run_train.sh``, and its default."""


def started(content: str, source: str, folder: Path, asked: Asked) -> tuple[str, Asked]:
    """The place of the configuration, and ``asked`` with what the script says of it in front of its own."""
    keys = [one for one in asked.assignments if "." in one.partition("=")[0]]
    variables = replace(asked, assignments=[one for one in asked.assignments if one not in keys]).variables()
    try:
        reading = read_script(content.replace("\r\n", "\n"), source, variables, beside(folder))
    except ScriptError as error:
        raise refused(error) from None
    found = next((one for one in reading.started if _at(one) is not None), None)
    if found is None:
        raise wrong_at(source, "starts no torchtitan: neither run_train.sh nor torchtitan.train")
    at = _at(found) or 0
    given, _ = taken_apart(found.words[at + 1 :], {}, found.origin)
    said: dict[str, Value] = {one.name: one.values[0] if one.values else () for one in given}
    file = said.pop(_FILE, None) or found.environment.get("CONFIG_FILE")
    by_python = {
        name: value
        for name, (variable, _) in _BY_PYTHON.items()
        if (value := said.pop(name, None) or found.environment.get(variable)) is not None
    }
    name = "" if file is None else text(file) if is_known(file) else beside_the_script(reading.ledger.shown(file))
    if not name and not by_python:
        raise wrong_at(
            found.origin,
            "names no configuration that is known: MODULE and CONFIG, CONFIG_FILE, --config or --job.config_file",
        )
    for key, value in {**by_python, **said}.items():
        if unknowns := reading.ledger.unknowns(value):
            raise needed(key, reading.ledger.shown(value), unknowns[0], found.origin)
    over = [f"{name.removeprefix('--')}={text(value) or 'true'}" for name, value in said.items()]
    gpus = gpus_of(found, at) or text(found.environment.get("NGPU", ()))
    if gpus and asked.gpus is None:
        over.append(f"NGPU={gpus}")
    versions = [one for one in asked.assignments if one.partition("=")[0] == VERSION]
    asked = replace(asked, assignments=(*over, *keys, *versions))
    if name and not by_python:
        return str(found_from(name, folder)), asked
    module, config = (text(by_python.get(name, ())) or default for name, (_, default) in _BY_PYTHON.items())
    place = place_of(module, (folder, Path()), found.origin)
    return place, replace(asked, assignments=(f"CONFIG={config}", *asked.assignments))


def _at(one: Started) -> int | None:
    return next((n for n, word in enumerate(one.words) if runs_torchtitan(text(word))), None)


TORCHTITAN = "torchtitan"
"""The name of this format."""
ALWAYS_SHARDED = "2026-04-09"
"""The day from which ``fully_shard`` is called on a single rank, too."""

TIED = "2026-03-11"
"""The day from which a weight that embedding and head share is in one unit (``apply_fsdp``)."""
SINCE_PACKED = "2026-06-24"
"""The day from which gpt-oss's layers, and the newest of dense models, are as they are estimated."""
OLDER, OTHER_KERNEL = "recipes-older", "attention-other"
"""What is told of layers that are not those of the job's code, and of their attention."""
FLAVOUR = ("model_spec.flavor", "model.flavor")
BACKEND = "model_spec.attn_backend"
ALL_FLEX = "2026-06-09"
"""The day from which language models have FlexAttention unless a configuration says another."""
_KERNELS = {
    "flex": "FlexAttention, which torchtitan compiles",
    "flex_flash": "FlexAttention by flash attention's kernel, which torchtitan compiles",
    "varlen": "flash attention of sequences of several lengths",
}
"""Kernels by ``attn_backend``, for people."""

DIFFERENCES: tuple[tuple[str, str], ...] = (
    ("2025-04-17", "nn.RMSNorm, one kernel in newer PyTorch (less)"),
    ("2025-08-29", "recompute to a layer's end, unless early_stop (more)"),
    ("2026-01-27", "keys and values that are not repeated to the query heads (less)"),
    ("2026-06-24", "queries, keys and values by one product (either way)"),
)
"""Changes of torchtitan's code after the layers' recipes, which are of December 2024, each from its day."""

SINCE_0_2_2: tuple[tuple[str, str], ...] = (
    ("2026-03-04", "a router in fp32 (more)"),
    ("2026-03-23", "selective recompute that keeps the choice of experts, and rows that were exchanged (more)"),
    ("2026-04-06", "rows of experts summed by scatter_add (either way)"),
    ("2026-06-24", "queries, keys and values by one product (either way)"),
)
"""The same of Qwen 3 and DeepSeek V3, whose recipes are of release 0.2.2,"""
IN_PARTS = (
    ("2026-03-02", "gradients of experts' inputs summed once, where experts begin (less)"),
    ("2026-05-20", "tokens of experts that ranks share not gathered before the router (less)"),
)
"""and with tensor parallelism."""


def read(place: str, asked: Asked) -> Launch:
    """The plan in the configuration at ``place``, or in the one that a script there starts torchtitan with."""
    place, function = found_at(place)
    if function:
        asked = replace(asked, assignments=(f"{CONFIG[0]}={function}", *asked.assignments))
    text, name = text_at(place)
    if is_script(text, name):
        place, asked = started(text, name, Path() if place == "-" else folder_of(path_of(place)), asked)
    if is_python(place) or (place == "-" and is_registry(text)):
        function, others = chosen(asked.assignments)
        asked = replace(asked, assignments=others)
        return torchtitan_of(written_in(place, function, _said(asked)), False, asked, is_python=True)
    return torchtitan_of(*read_configuration(place), asked)


_SECTIONS = {
    **dict.fromkeys(("recompute", "recompute-per-operator", "recompute-every"), "activation_checkpoint"),
    **{"loss": "loss", "optimizer": "optimizer", "model": "model_spec"},
}
"""Sections of a configuration that a flag replaces."""


def _said(asked: Asked) -> set[str]:
    """Keys and sections that are said beside the file."""
    keys = {assignment.partition("=")[0] for assignment in asked.assignments}
    return keys | {_SECTIONS[flag] for flag in asked.names if flag in _SECTIONS}


def torchtitan_of(written: Node, is_json: bool, asked: Asked, *, is_python: bool = False) -> Launch:
    """The plan in the configuration ``written``, which is JSON, or was TOML or Python."""
    given = flat(written)
    origin = Origin(written.origin.source)
    if written.mapping.keys() & {"framework", "extends"}:
        raise wrong_at(origin, "is a plan, not a configuration of torchtitan; leave out --from")
    if not any(key_of(name) is not None for name in given):
        raise wrong_at(
            origin, "has none of the keys of torchtitan's configuration ([model], [training], [parallelism] …)"
        )
    over, gpus, version = assigned(asked.assignments)
    era = era_of({**given, **over}, is_json=is_json, version=version, is_python=is_python)
    settings = Settings({**given, **over}, origin, era)
    _check_keys(settings)
    wrong = list(_misspelt(settings))
    if wrong:
        raise together(wrong)
    if gpus is not None and asked.gpus is not None and gpus.value != asked.gpus.value:
        raise wrong_at(gpus.origin, f"{gpus.value} GPUs are not the {asked.gpus.value} of --gpus")
    building = torchtitan_plan(settings, gpus, asked.tokens, asked.names)
    assumptions = [f"{era.label}: {era.why}"]
    if is_json and era.day >= NO_TOML:
        unseen = "linears in bf16" + (", and attention by scaled_dot_product_attention" if era.day < ALL_FLEX else "")
        assumptions.append(f"{unseen}: the file says of {'neither' if era.day < ALL_FLEX else 'no converter'}")
    notes = tuple(_notes(settings, strict=asked.strict))
    return Launch(
        Source(building.plan(), Path()),
        notes,
        tuple(_explained(settings, building)),
        finish=_Finish(settings),
        assumptions=tuple(assumptions),
    )


def _runs_newest(plan: Plan) -> bool:
    return framework(plan.framework).runs_newest(plan)


def _asking(plan: Plan) -> Plan:
    """``plan`` with layers of the newest code."""
    return plan.model_copy(update={"fsdp": plan.fsdp.model_copy(update={"newest": True})})


def _with_adapters(placed: Plan, plan: Plan) -> tuple[Plan, tuple[Note, ...]]:
    """``plan`` with those layers of ``lora.targets`` that its model has, and what is told of others
    (``LoRAConverter.convert``: a warning)."""
    known = framework(plan.framework).adaptable(placed) if _runs_newest(placed) else None
    targets = plan.lora.targets
    there = tuple(one for one in targets or () if known is None or one in known)
    if targets is None or not there or there == targets:
        return plan, ()
    nothing = " or ".join(one for one in targets if one not in there)
    note = f"nothing in {plan.model.name} is called {nothing} (target_modules): torchtitan goes on without"
    lora = plan.lora.model_copy(update={"targets": there})
    return plan.model_copy(update={"lora": lora}), (Note("lora-targets-unmatched", note),)


@dataclass(frozen=True, slots=True)
class _Finish:
    """Fills in fields that depend on others which flags may have changed: batches, stages, the split of the loss."""

    settings: Settings

    def __call__(self, read: ReadPlan) -> ReadPlan:
        plan = read.plan
        if framework(plan.framework).configuration != TORCHTITAN:
            return read
        origins = dict(read.origins)
        sections: dict[str, dict[str, object]] = {}

        def put(path: str, node: Node | None) -> None:
            if node is not None and path not in read.origins:
                section, _, name = path.partition(".")
                plain = node.plain()
                sections.setdefault(section, {})[name] = tuple(plain) if isinstance(plain, list) else plain
                origins[path] = node.origin

        layout, gpus = plan.layout, plan.hardware.gpus or 1
        replica = layout.tp * layout.pp * layout.cp
        put("layout.ep", expert_ranks(self.settings, plan))
        put("layout.etp", expert_parts(self.settings))
        put("fsdp.compile_loss", compiled_loss(self.settings, plan))
        put("optimizer.weight_decay", decay_of(self.settings, plan))
        if layout.dp is None and gpus % replica:
            return read  # the plan's own checks say so
        dp = data_parallel(read)
        self._check_sharded(plan, dp)
        self._check_context(plan)
        self._check_tied(plan)
        mbs, passes = self._microbatch(plan)
        put("batch.mbs", mbs)
        size = mbs.whole if "batch.mbs" not in read.origins else plan.batch.mbs
        put("batch.gbs", self._all(size * passes, dp, plan))
        if layout.tp > 1:
            whole = self._whole_loss()
            put("loss.kind", Node("plain" if whole.value else "vocab-parallel", whole.origin))
            if self.settings.has(SEQUENCE):
                put("layout.sequence_parallel", self.settings.switch(SEQUENCE))
        if self.settings.era.day < OUTPUTS_DROPPED:
            put("fsdp.return_outputs", Node(True, self.settings.where(*PP)))
        if layout.pp > 1:
            put("fsdp.reshard_after_forward", Node(False, self.settings.where(*RESHARD)))
            cut = stages(self.settings, plan.model.layers, layout.pp)
            put("pipeline.schedule", Node(cut.schedule, self.settings.where(*PP)))
            if "layout.vpp" not in read.origins and "pipeline.partition" not in read.origins:
                put("layout.vpp", Node(cut.chunks, self.settings.where(*PP)))
                put(
                    "pipeline.partition",
                    Node([Node(one, self.settings.where(*PP)) for one in cut.first], self.settings.where(*PP)),
                )
        update = {name: getattr(plan, name).model_copy(update=fields) for name, fields in sections.items()}
        plan = plan.model_copy(update=update)
        placed = plan.model_copy(update={"layout": plan.layout.model_copy(update={"dp": dp})})
        if "fsdp.newest" not in origins and self._may_be_newest(placed):
            plan = _asking(plan)
            origins["fsdp.newest"] = self.settings.where(*FLAVOUR)
            placed = _asking(placed)
        plan, left = _with_adapters(placed, plan)
        told = _packed if _runs_newest(placed) else _differences
        return ReadPlan(plan, origins, (*left, *told(self.settings), *read.warnings), read.assumptions)

    def _may_be_newest(self, plan: Plan) -> bool:
        """Layers are as they are in the newest code, where that has a recipe."""
        flavour = self.settings.word(*FLAVOUR, default="")
        older = str(flavour.value).endswith(UNFUSED) or self.settings.word(BACKEND, default="flex").value == "sdpa"
        return not older and self.settings.era.day >= SINCE_PACKED and _runs_newest(_asking(plan))

    def _check_sharded(self, plan: Plan, dp: int) -> None:
        shards = dp // plan.fsdp.replicas * plan.layout.cp
        if shards > 1 or self.settings.era.day >= ALWAYS_SHARDED:
            return
        name = self.settings.name(*(REPLICATE if dp > 1 else SHARD))
        what = "DDP" if dp > 1 else "one rank without fully_shard"
        problem = f"means {what}, which is not modelled for torchtitan's models: 2 ranks or more must share parameters"
        raise PlanError(
            name, ABSENT, problem, origin=self.settings.where(*REPLICATE) if dp > 1 else self.settings.where(*SHARD)
        )

    def _check_context(self, plan: Plan) -> None:
        """``Decoder.Config.update_from_config``."""
        backend = self.settings.word(BACKEND, default="flex")
        if plan.layout.cp > 1 and backend.value != "flex" and self.settings.era.day >= SINCE_PACKED:
            problem = "must be flex with context parallelism: torchtitan itself refuses others"
            raise backend.wrong(BACKEND, f"{problem} (--set {BACKEND}=flex)")

    def _check_tied(self, plan: Plan) -> None:
        if plan.model.tied_embeddings and self.settings.era.day < TIED:
            problem = f"must be false: {self.settings.era.label} shards embedding and head apart; later code, as one"
            raise PlanError("model.tied_embeddings", True, problem, origin=self.settings.where("model_spec.flavor"))

    def _microbatch(self, plan: Plan) -> tuple[Node, int]:
        """Sequences of a micro-batch, and how many of them a rank runs before it accumulates."""
        settings, pp = self.settings, plan.layout.pp
        if settings.has(TOKENS, ALL_TOKENS, LENGTH[0]):
            tokens = settings.integer(TOKENS, default=16_384)
            mbs = Node(self._sequences(tokens, TOKENS, plan), tokens.origin)
            passes = settings.integer("parallelism.num_pp_microbatches", default=1).whole if pp > 1 else 1
            return mbs, passes
        local = settings.integer(*BATCH, default=8)
        if pp == 1:
            return local, 1
        old = ("parallelism.pipeline_parallel_microbatches", "experimental.pipeline_parallel_microbatches")
        if settings.era.day < "2025-04-07":
            name, count = settings.name(*old), settings.optional(*old)
            total = len(stages(settings, plan.model.layers, pp).first) - 1 if settings.era.day >= "2025-01-07" else pp
            passes = count.whole if count is not None else total
            where = count.origin if count is not None else local.origin
        else:
            name = "parallelism.pipeline_parallel_microbatch_size"
            each = settings.integer(name, default=1)
            passes, rest = divmod(local.whole, each.whole)
            where = each.origin
            if rest:
                raise PlanError(name, each.value, f"must divide the batch of {local.value}", origin=where)
        if local.whole % passes:
            raise local.wrong(settings.name(*BATCH), f"must be a multiple of the {passes} micro-batches of a pipeline")
        return Node(local.whole // passes, where), passes

    def _all(self, local: int, dp: int, plan: Plan) -> Node:
        """Sequences of a step on all ranks."""
        settings = self.settings
        count = settings.optional(GLOBAL_BATCH)
        tokens = settings.optional(ALL_TOKENS)
        name = GLOBAL_BATCH if count is not None else ALL_TOKENS
        if count is None and tokens is not None:
            count = Node(self._sequences(tokens, ALL_TOKENS, plan), tokens.origin)
        if count is None:
            return Node(local * dp, self.settings.where(*BATCH, TOKENS))
        if plan.layout.pp > 1 and count.value != local * dp:
            raise count.wrong(
                name, f"must be {local * dp} with pipeline stages: several pipelines in a step are not modelled yet"
            )
        return count

    @staticmethod
    def _sequences(tokens: Node, name: str, plan: Plan) -> int:
        """Sequences that ``tokens`` are, of the length that the plan has, which a flag may have changed."""
        length = plan.batch.seq or 1
        if tokens.whole % length:
            way = f" (--set {LENGTH[0]}={tokens.whole} takes them as one sequence)" if name == TOKENS else ""
            raise tokens.wrong(
                name, f"must be a multiple of {LENGTH[0]}, which is {length}: other packing is not modelled{way}"
            )
        return tokens.whole // length

    def _whole_loss(self) -> Node:
        """Whether every tensor-parallel rank has whole logits."""
        found = self.settings.first("training.enable_loss_parallel")
        if found is not None:
            node = self.settings.switch(found[0])
            return Node(not node.value, node.origin)
        return self.settings.switch(*LOSS_WHOLE)


# -- what becomes of every key ------------------------------------------------------------------------


def _check_keys(settings: Settings) -> None:
    """Refuses keys of another day's code that would change the plan, and all of those under which no estimate means
    anything."""
    wrong: list[PlanError] = []
    for name, node in settings.given.items():
        key = key_of(name)
        if key is None:
            continue
        if not key.was(settings.era.day):
            if key.table is Table.MODELLED:
                problem = f"{_other_day(key, settings)}; --set torchtitan=RELEASE (or a day) says which code is meant"
                raise node.wrong(name, problem + _own_flag(name))
        elif key.table is Table.NOT_MODELLED and _matters(name, key, settings):
            direction, _, problem = key.why.partition(": ")
            if direction == "refused":
                off = key.default if key.default is not None else "false"
                problem += f" (--set {name}={off.replace('[]', '')} leaves it out)"
                wrong.append(node.wrong(name, problem))
    if wrong:
        raise together(wrong)


def _matters(name: str, key: Key, settings: Settings) -> bool:
    """Whether ``name``, which is not modelled by itself, is more than its default, and no converter that is."""
    low = low_keys(settings)
    known = (low is not None and low[0] == name) or (name == CONVERTERS[-1] and adapters_alone(settings))
    return settings.matters(name, key) and not known


def _own_flag(name: str) -> str:
    """Which flag of memplan's says what the key ``name`` does, whatever the code."""
    field = plan_fields().get(next((row.path for row in ROWS if name in row.names), ""))
    return f"; {field.flag} says it in any code" if field is not None and field.flag else ""


def _other_day(key: Key, settings: Settings) -> str:
    when = f"came on {key.since}" if key.since > settings.era.day else f"went on {key.until}"
    section = key.name.rpartition(".")[0]
    after = [
        one.name
        for one in keys().values()
        if one.since == key.until and one.was(settings.era.day) and one.name.rpartition(".")[0] == section
    ]
    when += f", as {', '.join(after)} came" if after and len(after) < 4 else ""
    return f"is no key of {settings.era.label}: it {when}"


def _notes(settings: Settings, *, strict: bool) -> Iterator[Note]:
    """Keys that no table has, that are another day's, or that are not modelled; errors if ``strict``."""
    elsewhere: list[str] = []
    guesses = _guesses(settings)
    for name, node in settings.given.items():
        problem = _problem(name, settings, guesses)
        if problem is None:
            continue
        key = key_of(name)
        code = "argument-unknown" if problem.startswith("is no key") else "argument-not-modelled"
        told = f"{name} = {shown(node.plain())}"
        note = left_out(code, name, node.plain(), problem, node.origin, strict=strict, told=told)
        if key is not None and not key.name.endswith("*") and not key.was(settings.era.day):
            elsewhere.append(name)
        else:
            yield note
    if elsewhere:
        names = ", ".join(elsewhere[:6]) + (", …" if len(elsewhere) > 6 else "")
        yield Note("argument-unknown", one_line(f"{names}: no keys of {settings.era.label}, and left out"))


def _misspelt(settings: Settings) -> Iterator[PlanError]:
    """Keys that look like others of that day which change memory; a fork may have others of its own."""
    guesses = _guesses(settings)
    for name, node in settings.given.items():
        guess = guesses.of(name) if key_of(name) is None else None
        meant = key_of(guess) if guess is not None and is_slip(name, guess) else None
        if guess is not None and meant is not None and meant.table is not Table.IRRELEVANT:
            yield node.wrong(name, guessed(f"is no key of {settings.era.label}", guess))


def _guesses(settings: Settings) -> Guesses:
    return Guesses(lambda name: nearest_key(name, settings.era.day))


def _problem(name: str, settings: Settings, guesses: Guesses) -> str | None:
    key = key_of(name)
    if key is None or (key.name.endswith("*") and not key.was(settings.era.day)):
        return guessed(f"is no key of {settings.era.label}", guesses.of(name))
    if not key.was(settings.era.day):
        return _other_day(key, settings)
    if key.table is not Table.NOT_MODELLED or not _matters(name, key, settings):
        return None
    direction, _, what = key.why.partition(": ")
    return f"is not modelled yet and {PUSHES[direction]}: {what}"


def _differences(settings: Settings) -> Iterator[Note]:
    name = str(settings.word("model_spec.name", "model.name", default="llama3").value)
    if name in PACKED:
        yield from _packed(settings)
        return
    differences, since = (DIFFERENCES, "December 2024") if name.startswith("llama") else (SINCE_0_2_2, "release 0.2.2")
    flavour = str(settings.word("model_spec.flavor", "model.flavor", default="debugmodel").value)
    backend = settings.word(BACKEND, default="flex" if settings.era.day >= ALL_FLEX else "sdpa")
    if name == FLEX and not flavour.startswith("debugmodel"):
        backend = settings.word(BACKEND, default="flex")
    if (other := _KERNELS.get(str(backend.value))) is not None:
        problem = (
            f"the model asks for {other}; estimated is scaled_dot_product_attention, whose tensors have the same sizes "
            "(not counted: masks, and what Inductor allocates; more)"
        )
        yield Note(OTHER_KERNEL, problem)
    differences += IN_PARTS if since != "December 2024" and settings.integer(*TP, default=1).value != 1 else ()
    later = [what for day, what in differences if day <= settings.era.day]
    if later:
        problem = f"layers are estimated as torchtitan had them in {since}; {settings.era.label} has"
        yield Note(OLDER, f"{problem} {'; '.join(later)}")


def _packed(settings: Settings) -> Iterator[Note]:
    """What is told of models whose recipes are of the newest code."""
    day, name = settings.era.day, str(settings.word("model_spec.name", "model.name", default="llama3").value)
    varlen = name == VARLEN and day >= ALL_FLEX
    backend = settings.word(BACKEND, default="varlen" if varlen else "flex")
    if backend.value != "varlen" and str(backend.value) in _KERNELS:
        problem = (
            f"the model asks for {_KERNELS[str(backend.value)]}; estimated is {_KERNELS['varlen']}, whose tensors have "
            "the same sizes (not counted: masks, and what Inductor allocates; more)"
        )
        yield Note(OTHER_KERNEL, problem)
    if name == VARLEN and day < SINCE_PACKED:
        problem = (
            f"layers are estimated as torchtitan has them in August 2026; {settings.era.label} had queries, keys and "
            "values by products of their own, and rows of experts that were padded and not added up by scatter_add "
            "(either way)"
        )
        yield Note("recipes-newer", problem)


def _explained(settings: Settings, building: Building) -> Iterator[Explained]:
    guesses = _guesses(settings)
    for name, node in settings.given.items():
        key = key_of(name)
        problem = _problem(name, settings, guesses)
        if problem is not None or key is None:
            became = problem or ""
        elif key.table is Table.MODELLED:
            became = ", ".join(dict.fromkeys(building.became.get(name, ["no effect here"])[:1]))
        elif key.table is Table.IRRELEVANT:
            became = key.why
        else:
            became = "its default, which does nothing"
        table = key.table if key is not None and key.was(settings.era.day) else None
        yield Explained(name, shown(node.plain()), node.origin, became, table)
