"""torchtitan's configurations in Python: followed, never run."""

# ruff: noqa: E501 (a table of configurations and the lines that they get)

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.commands.launched import flags_of_launch, read_launched
from memplan.formats.launch import launched_plan
from memplan.frameworks.fsdp.titan_low import check as check_float8
from memplan.frameworks.fsdp.torchtitan import check
from memplan.plan.errors import PlanError
from memplan.plan.read import ReadPlan
from memplan.plan.resolve import resolve

HEAD = """
import os
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, OptimizersInBackwardContainer, default_adamw
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.trainer import Trainer
"""
REGISTRY = (
    HEAD
    + """
from . import model_registry

SEQUENCE = 4 * 1024


def llama3_8b() -> Trainer.Config:
    spec = model_registry("8B")
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary(spec))),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * SEQUENCE, max_context_length=SEQUENCE),
        activation_checkpoint=SelectiveAC.Config(),
    )


def llama3_70b() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("70B")
    config.parallelism.tensor_parallel_degree = 8
    config.activation_checkpoint = FullAC.Config()
    return config


def in_the_old_way() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=OptimizersContainer.Config(lr=3e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=SEQUENCE),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective", selective_ac_option="op"),
    )
"""
)
MINE = """
import copy
from dataclasses import replace

from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer

from .common import shared

GPUS = 16
BIG = GPUS > 8


def base(degree: int = 1, *, policy=None) -> Trainer.Config:
    config = copy.deepcopy(llama3_8b())
    config.parallelism.tensor_parallel_degree = degree
    config.activation_checkpoint = policy
    return config


def mine() -> Trainer.Config:
    config = base(2 if BIG else 1)
    shared(config)
    for name in ("steps", "gc_freq"):
        assert name
    config.training = replace(config.training, max_context_length=2048)
    config.training.num_tokens_per_microbatch_per_dp_rank *= 2
    config.override.imports.append("some.override")
    config.override.imports += ["another"]
    return config
"""
OPTIMIZER = """
def default_adamw(lr: float = 8e-4, **kwargs: Any) -> OptimizersContainer.Config:
    return OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern=r".*",
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": lr, "betas": (0.9, 0.95), "weight_decay": 0.1, **kwargs},
            )
        ]
    )
"""
GRAPHS = "training.disable_cuda_graphs=true"

Read = Callable[..., ReadPlan]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads a file of a small checkout of torchtitan, known by what stands in it, with flags over it."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "torchtitan" / "models" / "llama3"
    model.mkdir(parents=True)
    optimizer = model.parent.parent / "components" / "optimizer"
    for folder in (model, model.parent, model.parent.parent, tmp_path / "recipes", optimizer.parent, optimizer):
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
    (optimizer / "__init__.py").write_text("from .optimizer import default_adamw")
    (optimizer / "optimizer.py").write_text(OPTIMIZER)
    (model / "config_registry.py").write_text(REGISTRY)
    (tmp_path / "recipes" / "mine.py").write_text(MINE)
    common = "def shared(config):\n    config.training.disable_cuda_graphs = True\n"
    (tmp_path / "recipes" / "common.py").write_text(common)

    def read(place: str, *over: str, text: str = "", **given: str) -> ReadPlan:
        if text:
            (tmp_path / place).write_text(text)
        flags = {"gpus": "16", **{name.replace("_", "-"): value for name, value in given.items()}}
        flags = {name: value for name, value in flags.items() if value}
        return launched_plan(read_launched(place, flags_of_launch(place, None, over), flags), flags)

    return read


LLAMA = "torchtitan/models/llama3/config_registry.py"


def test_a_function_that_torchtitan_ships(read: Read) -> None:
    found = read(LLAMA, "CONFIG=llama3_8b", GRAPHS, loss="plain")
    plan = resolve(found.plan)
    assert (plan.model.name, plan.batch.mbs, plan.batch.seq, plan.layout.dp) == ("llama-3-8b", 2, 4096, 16)
    assert plan.fsdp.per_operator
    assert plan.fsdp.ends_apart
    assert plan.optimizer.implementation == "fused"
    assert "torchtitan of 2026-08-21" in " ".join(found.assumptions)
    assert plan.fsdp.newest
    assert [note.code for note in found.warnings] == ["attention-other"]
    older = read(LLAMA, "CONFIG=llama3_8b", GRAPHS, loss="plain", tp="2")
    assert not older.plan.fsdp.newest
    assert [note.code for note in older.warnings] == ["attention-other", "recipes-older"]


def test_a_function_as_torchtitan_ships_it(read: Read) -> None:
    """Neither flags nor ``--set``: loss in chunks, and CUDA graphs, which are on unless they are turned off."""
    plan = resolve(read(LLAMA, "CONFIG=llama3_8b").plan)
    assert (plan.loss.kind, plan.loss.chunks, plan.fsdp.cuda_graphs) == ("chunked", 8, True)
    assert not resolve(read(LLAMA, "CONFIG=in_the_old_way").plan).fsdp.cuda_graphs
    assert not resolve(read(LLAMA, "CONFIG=llama3_8b", GRAPHS).plan).fsdp.cuda_graphs


def test_the_loss_alone_is_compiled(read: Read) -> None:
    text = one(compile='CompileConfig(enable=True, components=["loss"])', loss="ChunkedLossWrapper.Config()")
    assert resolve(read("job.py", text=text).plan).fsdp.compile_loss
    whole = resolve(read("job.py", text=one(compile='CompileConfig(enable=True, components=["loss"])')).plan)
    assert (whole.loss.kind, whole.fsdp.compile, whole.fsdp.compile_loss) == ("plain", False, True)


@pytest.mark.parametrize(
    ("kinds", "fused", "says"),
    [
        (("AdamW", "Adam", "AdamW"), True, ""),
        (("AdamW", "AdamW"), False, "must be one group of Adam or AdamW, or several that are fused"),
        (("DistMuon", "AdamW"), True, "must be one group of Adam or AdamW, or several that are fused"),
    ],
)
def test_groups_of_parameters(read: Read, kinds: tuple[str, ...], fused: bool, says: str) -> None:
    groups = ", ".join(f'ParamGroupConfig(pattern=".*", optimizer_name="{kind}")' for kind in kinds)
    how = "fused" if fused else "foreach"
    text = one(optimizer=f'OptimizersContainer.Config(param_groups=[{groups}], implementation="{how}")')
    if says:
        with pytest.raises(PlanError, match=says):
            read("job.py", text=text)
        return
    optimizer = resolve(read("job.py", text=text).plan).optimizer
    assert (optimizer.name, optimizer.implementation) == ("adamw", "fused")


@pytest.mark.parametrize("flavour", ["1.7B", "debugmodel", "debugmodel_non_fused_qkv"])
def test_a_weight_that_embedding_and_head_share(read: Read, flavour: str) -> None:
    text = one(model_spec=f'model_registry("{flavour}")').replace("models.llama3 import", "models.qwen3 import")
    plan = resolve(read("job.py", text=text).plan)
    assert plan.model.tied_embeddings
    check(plan)


def test_float8(read: Read) -> None:
    """By rows unless it says otherwise, and of the head, too; under tensor parallelism it is refused."""

    def job(given: str, **more: str) -> str:
        return one(model_spec=f'model_registry("8B", converters=[Float8LinearConverter.Config({given})])', **more)

    plan = resolve(read("job.py", text=job('filter_fqns=["lm_head"], model_compile_enabled=True')).plan)
    assert (plan.precision.fp8, plan.fsdp.filter_fqns) == ("rowwise", ("output",))
    plan = resolve(read("job.py", text=job('recipe_name="rowwise_with_gw_hp"')).plan)
    assert (plan.precision.fp8, plan.fsdp.filter_fqns) == ("rowwise_with_gw_hp", ())
    found = read("job.py", text=job("", parallelism="ParallelismConfig(tensor_parallel_degree=2)"))
    with pytest.raises(PlanError, match=r"precision.fp8 = rowwise: must be left out with tensor parallelism"):
        check_float8(resolve(found.plan))


def test_mxfp8_and_nvfp4(read: Read) -> None:
    """All layers, those whose names are given, and the first ones of as many as the model has: of the 32 of Llama 3 8B
    the last five, 15 % rounded up, stay in bf16 (torchtitan's ``nvfp4_bf16_tail_fqns``)."""

    def job(given: str) -> str:
        return one(model_spec=f'model_registry("8B", converters=[{given}])')

    plan = resolve(read("job.py", text=job("MXFP8LinearConverter.Config(model_compile_enabled=True)")).plan)
    assert (plan.precision.fp8, plan.precision.fp4, plan.fsdp.fqns, plan.fsdp.newest) == ("mxfp8", None, (), True)
    plan = resolve(read("job.py", text=job('MXFP8LinearConverter.Config(fqns=["attention", "lm_head"])')).plan)
    assert plan.fsdp.fqns == ("attention", "lm_head")
    first = job(
        "NVFP4LinearConverter.Config(fqns=first_layers(len(cast(Model.Config, model_registry('8B').model).layers)))"
    )
    first += """
def first_layers(layers: int) -> list[str]:
    return [f"layers.{i}." for i in range(layers - math.ceil(layers * 0.15))]
"""
    plan = resolve(read("job.py", text=first).plan)
    assert (plan.precision.fp8, plan.precision.fp4) == (None, "nvfp4")
    assert plan.fsdp.fqns == tuple(f"layers.{layer}." for layer in range(27))
    grouped = "MXFP8GroupedExpertsConverter.Config(pad_multiple=128)"
    given = read("job.py", text=job(f'MXFP8LinearConverter.Config(fqns=["attention"]), {grouped}')).plan.fsdp
    assert (given.fqns, given.pad_multiple) == (("attention",), 128)
    given = read("job.py", text=job(grouped)).plan.fsdp
    assert (given.fqns, given.pad_multiple) == (("inner_experts",), 128)
    for other in ("NVFP4LinearConverter.Config()", "Float8LinearConverter.Config()", grouped):
        with pytest.raises(PlanError, match=r"model_spec.converters = \[.*: is not modelled: .*of linear layers"):
            read("job.py", text=job(f"{other}, {grouped}"))


def test_a_function_that_changes_another(read: Read) -> None:
    plan = resolve(read(LLAMA, "CONFIG=llama3_70b", GRAPHS, loss="plain").plan)
    assert (plan.model.name, plan.layout.tp, plan.layout.dp, plan.recompute.mode) == ("llama-3-70b", 8, 2, "full")


def test_a_function_of_earlier_code(read: Read) -> None:
    """Keys that went in June 2026: neither CUDA graphs nor a chunked loss."""
    found = read(LLAMA, "CONFIG=in_the_old_way")
    plan = resolve(found.plan)
    assert (plan.batch.mbs, plan.batch.seq, plan.loss.kind, plan.fsdp.per_operator) == (2, 4096, "plain", True)
    assert "torchtitan of 2026-03-22" in " ".join(found.assumptions)


def test_a_file_of_ones_own(read: Read) -> None:
    """Functions of other files, with arguments and changes: followed as Python would."""
    found = read("recipes/mine.py", "CONFIG=mine", loss="plain")
    plan = resolve(found.plan)
    assert (plan.batch.mbs, plan.batch.seq, plan.layout.tp, plan.recompute.mode) == (8, 2048, 2, "none")
    (note,) = (one for one in found.warnings if one.code == "argument-not-modelled")
    assert "override.imports = [some.override, another]" in note.message


@pytest.mark.parametrize(
    "script",
    [
        "NGPU=8 MODULE=llama3 CONFIG=llama3_70b ./run_train.sh --training.disable_cuda_graphs",
        "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config=llama3_70b --training.disable_cuda_graphs",
        "export MODULE=torchtitan.models.llama3 CONFIG=llama3_70b NGPU=8\nbash ./run_train.sh --training.disable_cuda_graphs true",
        'NGPU=8\nMODULE=${MODULE:-"llama3"}\nCONFIG=${CONFIG:-llama3_70b}\ntorchrun --nproc_per_node=${NGPU} -m torchtitan.train --module ${MODULE} --config ${CONFIG} --training.disable_cuda_graphs "$@"',
    ],
)
def test_launch_lines(read: Read, script: str) -> None:
    plan = resolve(read("go.sh", text=f"#!/bin/bash\n{script}\n", gpus="", loss="plain").plan)
    assert (plan.model.name, plan.hardware.gpus, plan.layout.tp) == ("llama-3-70b", 8, 8)


def test_keys_that_are_set_beside_a_script(read: Read) -> None:
    script = "#!/bin/bash\nNGPU=8 MODULE=llama3 CONFIG=${CONFIG} ./run_train.sh\n"
    plan = resolve(read("go.sh", "CONFIG=llama3_8b", GRAPHS, text=script, gpus="", loss="plain").plan)
    assert (plan.model.name, plan.hardware.gpus) == ("llama-3-8b", 8)


def one(*lines: str, **fields: str) -> str:
    """A file with one function, whose fields are replaced by ``fields``, and ``lines`` before it returns."""
    given = {
        "model_spec": 'model_registry("8B")',
        "training": "TrainingConfig(disable_cuda_graphs=True)",
        "activation_checkpoint": "None",
        **fields,
    }
    made = ", ".join(f"{name}={value}" for name, value in given.items())
    body = "\n    ".join((f"config = Trainer.Config({made})", *lines, "return config"))
    return f"{HEAD}from torchtitan.models.llama3 import model_registry\n\n\ndef job():\n    {body}\n"


@pytest.mark.parametrize(
    ("text", "over", "line"),
    [
        (HEAD, (), "job.py: has no function that makes a configuration; give the config.json that a run saves"),
        (HEAD + "def a(:\n", (), "job.py:8: is no Python that can be read (invalid syntax); give the config.json"),
        (one(), ("CONFIG=jib",), "job.py: CONFIG = jib: is no function of this file that is followed; did you mean job?"),
        (one() + "def other():\n    return 1\n", ("CONFIG=other",), "job.py: CONFIG = other: makes no Trainer.Config"),
        (one() + "def other():\n    return job()\n", (), "job.py: has 2 functions: say which with --set CONFIG=NAME (job, other)"),
        (one("config.parallelism.tensor_parallel_degree = int(os.environ['TP'])"), (), "job.py:13: parallelism.tensor_parallel_degree: is int(os.environ['TP']), which only running code knows: say it with --set parallelism.tensor_parallel_degree=VALUE"),
        (one("if os.environ.get('BIG'):\n        config.training.seq_len = 8"), (), "job.py:13: depends on os.environ.get('BIG'), which only running code knows; give the config.json"),
        (one("tuned(config)"), (), "job.py:13: tuned(…) may change the configuration, and is not found"),
        (one("while True:\n        pass"), (), "job.py:13: has a statement that is not followed (while)"),
        (one("for n in lengths():\n        config.training.seq_len = n"), (), "job.py:13: repeats what depends on lengths(), which is not followed"),
        (one("found = [[range(4096) for n in range(4096)] for m in range(4096)]"), (), "makes more text than a file should"),
        (one("return job()"), (), "calls itself too deeply"),
        (one(loss="MTPLoss.Config()"), (), "job.py:12: loss: is MTPLoss, which is not modelled; --loss plain estimates the plain one"),
        (one(activation_checkpoint="OwnAC.Config()"), (), "activation_checkpoint: is OwnAC, which is not modelled; --recompute full or none"),
        (one(activation_checkpoint="MemoryBudgetAC.Config()"), (), "activation_checkpoint.mode = memory_budget: is not modelled: Inductor's partitioner"),
        (one(optimizer="OptimizersInBackwardContainer.Config(lr=1e-4)"), (), "optimizer: is OptimizersInBackwardContainer.Config, which is not modelled; --optimizer adamw"),
        (one(optimizer="mine()"), (), "optimizer: is mine(), which only running code knows: --optimizer adamw estimates AdamW"),
        (one(optimizer="MuonContainer.Config()"), (), "optimizer: is MuonContainer.Config, which is not modelled; --optimizer adamw"),
        (one(loss="ChunkedLossWrapper.Config()", compile="CompileConfig(enable=True)", parallelism="ParallelismConfig(tensor_parallel_degree=2)"), (), "no other was learnt; --no-compile-loss takes the loss as it is"),
        (one(training="TrainingConfig()", parallelism="ParallelismConfig(pipeline_parallel_degree=2)"), (), "layout.pp = 2: must be 1 with CUDA graphs, as torchtitan itself demands"),
        (one(model_spec='model_registry("9B")'), (), "job.py:12: model_spec.flavor = 9B: of model llama3 has no sizes here (1B, 3B, 8B, 70B, 405B)"),
        (one().replace("models.llama3 import", "models.flux import"), (), "job.py:12: model_spec.name = flux: has no recipe: it makes images; torchtitan's models with one: deepseek_v3"),
        (one(model_spec="model_registry(os.environ['SIZE'])"), (), "model_spec.flavor: is os.environ['SIZE'], which only running code knows: say it with --set model_spec.flavor=VALUE"),
        (one(model_spec='model_registry("8B", converters=[LoRAConverter.Config(rank=8), NVFP4LinearConverter.Config(fqns=["a"]), MXFP8LinearConverter.Config()])'), (), "model_spec.converters = [LoRAConverter, NVFP4LinearConverter, MXFP8LinearConverter]: is not modelled: torchao's float8"),
        (one(model_spec='model_registry("8B", num_mtp_layers=1)'), (), "model_spec.num_mtp_layers = 1: has no recipe: layers that predict further tokens"),
        (one(), ("activation_checkpoint.mode=full", "training.max_context_length=2048"), "says which code is meant; --recompute says it in any code"),
        (one().replace("= Trainer.C", "= GraphTrainer.C"), (), "job.py:12: CONFIG = job: makes a GraphTrainer.Config: that trainer traces a whole step"),
        (one("config = to_graph_trainer_config(config, spec)").replace("\n\n\ndef", "\nfrom torchtitan.experiments.graph_trainer.configs import to_graph_trainer_config\n\n\ndef"), (), "makes a GraphTrainer.Config: that trainer traces"),
        (one(model_spec="own_spec()"), (), "model_spec: is own_spec(), which only running code knows: give the config.json"),
        (one(training="TrainingConfig(disable_cuda_graphs=True, max_contxt_length=4096)"), (), "training.max_contxt_length = 4096: is no key of torchtitan of 2026-08-21; did you mean training.max_context_length?"),
        (one(model_spec='model_registry("8B", attn_backend="varlen")', parallelism="ParallelismConfig(context_parallel_degree=2)"), (), "model_spec.attn_backend = varlen: must be flex with context parallelism"),
        ("from torchtitan.trainer import Trainer  # Config\n" + "x = " + "(" * 5000, (), "job.py:2: is no Python that can be read"),
        ("from torchtitan.config import Config\n" + "#" * 400_000, (), "job.py: is Python of more than 300,000 characters"),
    ],
)  # fmt: skip
def test_one_line_for_what_is_wrong(read: Read, text: str, over: tuple[str, ...], line: str) -> None:
    with pytest.raises(PlanError) as caught:
        resolve(read("job.py", *over, text=text).plan)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_known_and_does_not_matter(read: Read) -> None:
    """Seeds, folders and data may be computed; what is computed may be said beside the file."""
    text = one(
        "config.training.steps = int(os.environ['STEPS'])",
        "config.dataloader = own_data(os.environ['DATA'])",
        "config.parallelism.tensor_parallel_degree = int(os.environ['TP'])",
    )
    plan = resolve(read("job.py", "parallelism.tensor_parallel_degree=2", text=text).plan)
    assert (plan.layout.tp, plan.batch.mbs, plan.batch.seq) == (2, 8, 2048)


@pytest.mark.parametrize("converter", ["LoRA2Converter", "Float8GroupedExpertsConverter"])
def test_other_converters_are_refused(read: Read, converter: str) -> None:
    text = one(model_spec=f'model_registry("8B", converters=[{converter}.Config()])')
    with pytest.raises(PlanError, match=rf"model_spec.converters = \[{converter}\]: is not modelled"):
        read("job.py", text=text, gpu="b200")
    assert read("job.py", "model_spec.converters=", text=text).plan.precision.fp8 is None


@pytest.mark.parametrize(("ranks", "why"), [(4, "what other libraries allocate"), (1, "torchtitan itself refuses")])
def test_an_experts_backend_is_refused(read: Read, ranks: int, why: str) -> None:
    spec = 'model_registry("16B", moe_comm_backend="deepep")'
    parallel = f"ParallelismConfig(expert_parallel_degree={ranks})"
    text = one(model_spec=spec, parallelism=parallel).replace(".llama3 ", ".deepseek_v3 ")
    with pytest.raises(PlanError, match=rf"model_spec.moe_comm_backend = deepep: must be standard: {why}"):
        read("job.py", text=text)


@pytest.mark.parametrize(
    ("argument", "tp", "told"),
    [
        ('tp_gemm_backend="dist_gemm"', 1, []),
        ('tp_gemm_backend="dist_gemm"', 2, ["argument-not-modelled"]),
        ("of_a_fork=3", 1, ["argument-unknown"]),
    ],
)
def test_every_argument_of_the_registry_is_a_key(read: Read, argument: str, tp: int, told: list[str]) -> None:
    """Products that gather by themselves, which are others with tensor parallelism alone, and one that nobody knows."""
    text = one(
        model_spec=f'model_registry("8B", {argument})', parallelism=f"ParallelismConfig(tensor_parallel_degree={tp})"
    )
    codes = {note.code for note in read("job.py", text=text).warnings}
    assert sorted(codes & {"argument-not-modelled", "argument-unknown"}) == told


def test_muse_glimmer(read: Read) -> None:
    """Its words alone; the vision tower of others is not modelled. FlexAttention is told of."""
    text = one(model_spec='model_registry("debugmodel")', parallelism='ParallelismConfig(spmd_backend="spmd_types")')
    made = read("job.py", text=text.replace(".llama3 ", ".muse_glimmer "))
    spec = resolve(made.plan).model
    assert (spec.family, spec.layers, spec.hidden, spec.head_dim, spec.ffn) == ("muse_glimmer", 8, 256, 64, 768)
    assert [note.code for note in made.warnings] == ["attention-other"]
    with pytest.raises(PlanError, match=r"flavor = debugmodel_mm: of model muse_glimmer has a vision tower"):
        read("job.py", text=text.replace(".llama3 ", ".muse_glimmer ").replace('"debugmodel"', '"debugmodel_mm"'))


def test_qwen3_5(read: Read) -> None:
    """Its decoder, by a name of memplan's; flavours have a vision tower, too."""
    text = one(model_spec='model_registry("4B")').replace(".llama3 ", ".qwen3_5 ")
    says = "4B: of model qwen3_5 has a vision tower, which is not modelled: --model qwen3.5-4b --tied-embeddings false"
    with pytest.raises(PlanError, match=re.escape(says)):
        read("job.py", text=text)
    made = read("job.py", text=text, model="qwen3.5-4b", tied_embeddings="false")
    spec = resolve(made.plan).model
    assert (spec.family, spec.layers, spec.linear_interval, spec.linear_value_heads) == ("qwen3_5", 32, 4, 32)
    assert [note.code for note in made.warnings] == ["attention-other"]


def test_nothing_is_run(read: Read, tmp_path: Path) -> None:
    text = one().replace("def job", f"open({str(tmp_path / 'ran')!r}, 'w').write('x')\n\n\ndef job")
    read("job.py", text=text)
    assert not (tmp_path / "ran").exists()


def test_python_of_another_kind_is_still_refused(read: Read) -> None:
    with pytest.raises(PlanError, match="is Python, which is not run"):
        read("job.py", text="import torch\n\nprint(1)\n")


@pytest.mark.parametrize(
    ("arguments", "rank", "targets"),
    [
        ('rank=16, alpha=32.0, target_modules=["wqkv", "wo"]', 16, ("wqkv", "wo")),
        ('target_modules=["wq", "wkv", "wo"]', 8, ("wo",)),
    ],
)
def test_adapters(read: Read, arguments: str, rank: int, targets: tuple[str, ...]) -> None:
    """Names that the model has not are left out with a warning (``LoRAConverter.convert``)."""
    text = one(model_spec=f'model_registry("8B", converters=[LoRAConverter.Config({arguments})])')
    found = read("job.py", text=text)
    plan = resolve(found.plan)
    assert (plan.lora.rank, plan.lora.targets, plan.lora.dtype, plan.fsdp.parameters) == (rank, targets, "fp32", "fp32")
    told = [note.message for note in found.warnings if note.code == "lora-targets-unmatched"]
    assert told == ["nothing in llama-3-8b is called wq or wkv (target_modules): torchtitan goes on without"] * (
        rank == 8
    )
