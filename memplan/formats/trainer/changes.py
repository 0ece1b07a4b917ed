"""What a training script does beside its arguments that changes memory: casts of the model, a larger vocabulary,
Liger's kernels, a Trainer of its own, a second model, variables of the environment.

Read where the script says it, asked for where it does not; nothing is passed over.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...plan.errors import Node, Origin, one_line
from ..training_scripts import matters
from .keys import RESIZED
from .parsed import FLAGS, LOADED, Parsed
from .syntax import UNKNOWN, bound_once, name_of, owner_of

ANOTHER = re.compile(r"(?i)ref|teacher|reward|vision|judge")
"""Models beside the one that is trained, by the names that scripts give them."""

_CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods of ``torch.nn.Module``."""
_SETTERS = {f"set_{name}": name for name in ("attn_implementation", "experts_implementation")}
_METHODS = (*_CASTS, "to", *_SETTERS, "gradient_checkpointing_enable", RESIZED)
_OF_DTYPES = re.compile(r"b?float(?:16|32)|half|float")
_LIGER = re.compile(r"_?apply_liger_kernel\w*|AutoLigerKernelForCausalLM")
"""``liger_kernel/transformers/monkey_patch.py`` and ``auto_model.py``: both take the pieces as keywords."""
_PIECES = ("rope", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")
SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
"""``device_map``'s words under which a process takes all GPUs that it sees (accelerate's ``get_balanced_memory``)."""
_LOSSES = ("compute_loss", "training_step")
_OPTIMIZERS = ("create_optimizer", "create_optimizer_and_scheduler")


def subclasses(script: Parsed, *names: str) -> dict[str, str]:
    """Classes that the script derives from those of ``names``, and which."""
    found: dict[str, str] = {}
    for node in _classes(script):
        for base in node.bases:
            name = ast.unparse(base).rpartition(".")[2]
            if name in names or name in found:
                found[node.name] = found.get(name, name)
    return found


def own_code(script: Parsed, trainers: dict[str, str], calls: list[ast.Call], *, scores: bool) -> None:
    """A Trainer whose loss or optimizer the script writes itself; a loss of few scores is small whatever it is."""
    methods = [
        (f"{node.name}.{method.name}", method.name, method.lineno)
        for node in _classes(script)
        if node.name in trainers
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not _returns_super(method)
    ]
    losses = [(name, line) for name, method, line in methods if method in _LOSSES]
    given = [_given(script, call, "compute_loss_func") for call in calls]
    losses += [("compute_loss_func", one.lineno) for one in given if one is not None]
    if losses and not scores and "loss" not in script.asked:
        problem = "is a loss of the script's own, which may keep logits once more, and is not modelled; --loss plain "
        script.ask(losses[0][0], f"{problem}takes the model's loss in its place", losses[0][1])
    optimizers = [(name, line) for name, method, line in methods if method in _OPTIMIZERS]
    if optimizers and "optimizer" not in script.asked:
        problem = "is an optimizer that the script makes itself: say which (--optimizer adamw)"
        script.ask(optimizers[0][0], problem, optimizers[0][1])


def _given(script: Parsed, call: ast.Call, name: str) -> ast.expr | None:
    given = script.keyword(call, name)
    return None if given is None or script.value(given) is None else given


def _returns_super(method: ast.FunctionDef) -> bool:
    """It does what its base does and hands that on, as one that logs does."""
    returned = [node.value for node in ast.walk(method) if isinstance(node, ast.Return) and node.value is not None]
    once = bound_once(method)
    values = [once.get(one.id, one) if isinstance(one, ast.Name) else one for one in returned]
    return bool(values) and all(ast.unparse(one).startswith(f"super().{method.name}(") for one in values)


def _classes(script: Parsed) -> list[ast.ClassDef]:
    return [node for node in ast.walk(script.module) if isinstance(node, ast.ClassDef)]


# -- the model that is trained ---------------------------------------------------------------------------


def names_of(script: Parsed, call: ast.Call) -> list[str]:
    """Names to which the script gives what ``call`` makes, by itself or with methods behind it."""
    return script.assigned.get(id(call), [])


def of_model(script: Parsed, model: ast.Call) -> None:
    """What the script does to the ``model`` that it loads."""
    names = {*names_of(script, model)}
    for call in script.calls:
        if not isinstance(call.func, ast.Attribute) or name_of(call) not in _METHODS:
            continue
        owner, method = call.func.value, call.func.attr
        if ast.unparse(owner) not in names and not any(one is model for one in ast.walk(owner)):
            continue
        if method in _CASTS or method == "to":
            _cast(script, call, _CASTS.get(method, ""))
        elif method in _SETTERS and call.args:
            script.put(_SETTERS[method], call.args[0])
        elif method == "gradient_checkpointing_enable":
            kept = script.keyword(call, "gradient_checkpointing_kwargs") or (call.args[0] if call.args else None)
            if kept is not None:
                script.put("gradient_checkpointing_kwargs", kept)
        elif method == RESIZED:
            _resized(script, call)
    spread = script.keyword(model, "device_map")
    if spread is not None and script.value(spread) in SPREAD:
        script.put("device_map", spread)
    if (made := configuration(script, model)) is not None:
        script.take(made, LOADED)


def configuration(script: Parsed, model: ast.Call) -> ast.Call | None:
    """``AutoConfig.from_pretrained(…)``, where ``model`` is loaded with it."""
    given = script.keyword(model, "config")
    made = script.once.get(given.id, given) if isinstance(given, ast.Name) else given
    return made if isinstance(made, ast.Call) and name_of(made) == "from_pretrained" else None


def _cast(script: Parsed, call: ast.Call, dtype: str) -> None:
    """``model.half()``, ``model.to(torch.bfloat16)``, ``model.to("cuda", dtype=torch.bfloat16)``; a device changes
    nothing."""
    said = [*call.args, *(one.value for one in call.keywords if one.arg == "dtype")]
    for one in [] if dtype else said:
        value = script.value(one)
        if isinstance(value, str) and _OF_DTYPES.fullmatch(value):
            dtype = {"half": "float16", "float": "float32"}.get(value, value)
        elif "dtype" in ast.unparse(one) and FLAGS["dtype"] not in script.asked:
            problem = f"is {one_line(ast.unparse(one))[:60]}, which only the running script knows: say it with --dtype"
            script.ask("to", problem, call.lineno)
    if dtype:
        script.found.pop("torch_dtype", None)
        script.found["dtype"] = Node.of(dtype, Origin(script.source, call.lineno))


def _resized(script: Parsed, call: ast.Call) -> None:
    """A number of rows, rounded up to ``pad_to_multiple_of`` (``_get_resized_embeddings`` of ``modeling_utils.py``);
    where a tokenizer says it, a note says that the model's own number is taken."""
    number = call.args[0] if call.args else script.keyword(call, "new_num_tokens")
    multiple = script.keyword(call, "pad_to_multiple_of")
    value = script.value(number) if number is not None else None
    step = script.value(multiple) if multiple is not None else 1
    rows: object = f"{one_line(ast.unparse(number))[:60]}" if number is not None else None
    if type(value) is int and isinstance(step, int) and step > 0:
        rows = -(-value // step) * step
    if rows is not None:
        script.found[RESIZED] = Node.of(rows, Origin(script.source, call.lineno))


def of_config(script: Parsed, config: ast.Call) -> None:
    """Arguments that are set behind the call which makes them: ``args.per_device_train_batch_size = 4``."""
    names = {*names_of(script, config)}
    for node in ast.walk(script.module):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Attribute) and ast.unparse(target.value) in names:
            script.put_later(target.attr, node)
    for call in script.calls:
        method = call.func if isinstance(call.func, ast.Attribute) else None
        if method is not None and method.attr.startswith("set_") and ast.unparse(method.value) in names:
            problem = "sets several arguments by one method, which is not read: write them as keywords of "
            script.ask(method.attr, problem + name_of(config), call.lineno)


def liger(script: Parsed) -> None:
    """Liger's kernels, by its functions in the place of ``use_liger_kernel``."""
    calls = [call for call in script.calls if _LIGER.fullmatch(name_of(call)) or _LIGER.fullmatch(owner_of(call))]
    for call in calls[:1]:
        script.found["use_liger_kernel"] = Node.of(True, Origin(script.source, call.lineno))
        said = {one.arg: script.value(one.value) for one in call.keywords if one.arg in _PIECES}
        known = {name: value for name, value in said.items() if isinstance(value, bool)}
        for name in said.keys() - known.keys():
            problem = f"of {name_of(call)} must be true or false in the script"
            script.ask(str(name), problem, call.lineno)
        if known:
            script.found["liger_kernel_config"] = Node.of(known, Origin(script.source, call.lineno))


# -- beside the model ------------------------------------------------------------------------------------


_ALIKE = "a reference of the policy's size and dtype is modelled; --trainer {} takes such a one in its place"


_REFERENCE_SECOND = ("DPOTrainer", "KTOTrainer")
"""Trainers of trl whose second parameter is ``ref_model`` (``trainer/dpo_trainer.py``)."""
WEIGHTS = ("quantization_config",)


def of_reference(script: Parsed, trainers: list[ast.Call], model: ast.Call | None) -> None:
    """A reference that is another model than the policy; DPO's is assumed to be of its size and dtype."""
    for call in trainers:
        given = _given(script, call, "ref_model")
        if given is None and name_of(call) in _REFERENCE_SECOND and len(call.args) > 1:
            given = call.args[1]
        made = script.once.get(given.id, given) if isinstance(given, ast.Name) else given
        loaded = [one for one in ast.walk(made) if isinstance(one, ast.Call)] if made is not None else []
        loaded = [one for one in loaded if name_of(one) == "from_pretrained"]
        named, policy = script.value(made) if made is not None else None, script.found.get("model_name_or_path")
        if "trainer" in script.asked:
            continue
        alike = _ALIKE.format("kto" if name_of(call) == "KTOTrainer" else "dpo")
        if isinstance(named, str) and made is not None and (policy is None or named != policy.value):
            script.ask("ref_model", f"is another model than the policy: {alike}", made.lineno)
        if not loaded or model is None:
            continue
        if any(said_of(script, loaded[0], name) != said_of(script, model, name) for name in ("", *LOADED, *WEIGHTS)):
            script.ask("ref_model", f"is loaded otherwise than the model: {alike}", loaded[0].lineno)


def said_of(script: Parsed, call: ast.Call, name: str) -> object:
    """What ``call``, which loads a model, is given as ``name``; the model's own name where that is empty."""
    given = script.keyword(call, name or "pretrained_model_name_or_path")
    if not name and call.args:
        given = call.args[0]
    value = script.value(given) if given is not None else None
    return ast.unparse(given) if value is UNKNOWN and given is not None else value


def of_rewards(script: Parsed, trainers: list[ast.Call]) -> None:
    """Reward models that GRPO runs beside the policy: names of models, which ``GRPOTrainer`` loads on every rank."""
    for call in trainers:
        given = _given(script, call, "reward_funcs")
        parts = given.elts if isinstance(given, (ast.List, ast.Tuple)) else [given] if given is not None else []
        for one in parts:
            if isinstance(name := script.value(one), str):
                script.found["reward_model_name_or_path"] = Node.of(name, Origin(script.source, one.lineno))


def environment(script: Parsed) -> dict[str, Node]:
    """Variables that the script sets itself and that change memory: ``os.environ["PYTORCH_CUDA_ALLOC_CONF"] = …``."""
    found: dict[str, Node] = {}
    for name, value in _set(script):
        said = script.value(value)
        if isinstance(said, str) and matters(name):
            found[name] = Node.of(said, Origin(script.source, value.lineno))
    return found


def _set(script: Parsed) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(script.module):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Subscript):
            name, value, of = script.value(target.slice), node.value, ast.unparse(target.value)
        elif isinstance(node, ast.Call) and name_of(node) == "setdefault" and len(node.args) == 2:
            name, value, of = script.value(node.args[0]), node.args[1], owner_of(node)
        elif isinstance(node, ast.Call) and name_of(node) == "update" and owner_of(node) == "environ":
            yield from (pair for given in node.args for pair in script.pairs(given) or ())
            yield from ((one.arg, one.value) for one in node.keywords if one.arg is not None)
            continue
        else:
            continue
        if isinstance(name, str) and of.endswith("environ"):
            yield name, value
