"""Megatron-Bridge's adapters in a plan: what is trained and kept, against hand calculations, and what is refused.

Their events beside the real modules are in ``tests.layers.megatron_core.test_te_modules``.
"""

from __future__ import annotations

import pytest

from memplan.assumptions import assumptions
from memplan.frameworks import framework
from memplan.frameworks.megatron.programs import programs
from memplan.layers.megatron_core.graphs import POOL
from memplan.layers.module import Counted, Options
from memplan.layers.work import Product
from memplan.plan.errors import PlanError
from memplan.plan.lora import adapter_parameters
from memplan.plan.plan import ResolvedPlan
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from memplan.tape.events import Category, Drop, Hold, Stretch, rounded
from memplan.tape.program import Program, fold_program, static

FLAGS = {
    "model": "llama-3-8b", "framework": "megatron", "layers": "2", "seq": "1024", "mbs": "1", "gbs": "2", "gpus": "1",
    "gpu": "h100-80gb", "lora-rank": "32",
}  # fmt: skip


EXPERTS = {"model": "qwen3-30b-a3b", "ep": "4", "gpus": "8", "gbs": "8"}

BIASED = {"model": "gpt-oss-20b", "ep": "8", "gpus": "8", "gbs": "8"}
GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": "mlp", "lora_targets": "linear_qkv"}
"""As NVIDIA's recipes for LoRA of Llama 3 70B have them."""
HYBRID = {
    "model": "nemotron-3-nano-30b-a3b",
    "layers": "6",
    "layer_pattern": "ME*E-M",
    "ep": "8",
    "gpus": "8",
    "gbs": "8",
}


def plan_of(**flags: str) -> ResolvedPlan:
    return resolve(read_plan(None, {**FLAGS, **{name.replace("_", "-"): value for name, value in flags.items()}}).plan)


def made(**flags: str) -> tuple[Program, ...]:
    return programs(plan_of(**flags), Options())


def held(tape: Stretch, category: Category) -> int:
    size = 0
    for event in tape:
        if isinstance(event, Hold | Drop) and event.category is category:
            size += event.bytes if isinstance(event, Hold) else -event.bytes
    return size


H, F, QKV, VOCAB = 4096, 14336, 6144, 128256
OF_LAYER = {(QKV, H), (H, H), (2 * F, H), (H, F)}
"""Linear layers of Llama 3 8B: outputs and inputs."""


def test_parameters_by_hand() -> None:
    """r (n + k) of each of four linear layers."""
    plan = plan_of()
    of_layer = sum(32 * (n + k) for n, k in OF_LAYER)
    assert adapter_parameters(plan) == 2 * of_layer == 4_456_448
    for targets in ("linear_qkv", "linear_qkv,linear_qkv"):
        assert adapter_parameters(plan_of(lora_targets=targets)) == 2 * 32 * (QKV + H)
    assert any("LoRA by Megatron-Bridge 0.6 on linear_qkv, linear_proj" in one for one in assumptions(plan))


def test_norms_by_hand() -> None:
    """DoRA: a magnitude for each output, whole on every rank where ranks share a layer's inputs; of each layer the sum
    of its output and its adapter's, (1024, 1, n) in bf16, is kept for backward, and norms and their scale, (n,)."""
    plan, dora = plan_of(), plan_of(use_dora="true")
    outputs = sum(n for n, _ in OF_LAYER)
    assert adapter_parameters(dora) - adapter_parameters(plan) == 2 * outputs
    assert any("DoRA by Megatron-Bridge 0.6 on linear_qkv" in one for one in assumptions(dora))
    parallel = {"tp": "2", "gpus": "2", "sequence_parallel": "true"}
    trained = [
        sum(one.elements for one in _modules(made(**flags)[0])["layer.0"].parameters if "magnitude" in one.name)  # type: ignore[attr-defined]
        for flags in ({"use_dora": "true"}, {"use_dora": "true", **parallel})
    ]
    assert trained == [outputs, (QKV + 2 * F) // 2 + 2 * H]
    saved = [
        sum(held(_modules(program)["layer.0"].steady.forward, category) for category in Category)  # type: ignore[attr-defined]
        for (program,) in (made(), made(use_dora="true"))
    ]
    norms = sum(rounded(2 * n) for n, _ in OF_LAYER)
    assert saved[1] - saved[0] == 2 * 1024 * outputs + 2 * norms


def test_norms_without_a_graph_end_their_operands() -> None:
    """The scaled B of each of four layers, (n, 32) in bf16, lives until the norm is there if a graph holds it, and not
    beside the sum of weights in evaluation."""
    (program,) = made(use_dora="true")
    layer = _modules(program)["layer.0"]
    for tape, kept in ((layer.steady.forward, True), (layer.evaluation, False)):  # type: ignore[attr-defined]
        live: dict[int, str] = {}
        beside = []
        for event in tape:
            if isinstance(event, Hold):
                live[event.tensor] = event.name
                if event.name.endswith("_norm_weight"):
                    beside.append(any(name.endswith("_norm_scaled") for name in live.values()))
            elif isinstance(event, Drop):
                live.pop(event.tensor, None)
        assert beside == [kept] * 4


PARTS = "linear_q,linear_k,linear_v,linear_proj,linear_fc1_gate,linear_fc1_up,linear_fc2"
"""Of ``CanonicalLoRA``, by default."""


def test_parts_of_layers_by_hand() -> None:
    """Each part has an A of its own, (32, H), and a B of its outputs: 32 heads of 128, 8 groups twice, F twice. What
    each A makes, (1024, 1, 32) in bf16, is kept for backward: three more of a layer. The input is kept once."""
    plan, parts = plan_of(), plan_of(lora_targets=PARTS)
    assert adapter_parameters(parts) - adapter_parameters(plan) == 2 * 3 * 32 * H
    assert adapter_parameters(plan_of(lora_targets="linear_k,linear_q,linear_v")) == 2 * 32 * (QKV + 3 * H)
    (usual,), (apart,) = made(), made(lora_targets=PARTS)
    trained = {one.name: one.shape for one in _modules(apart)["layer.0"].parameters if one.trained}  # type: ignore[attr-defined]
    assert trained["self_attention.linear_qkv.k.adapter.linear_out.weight"] == (1024, 32)
    assert trained["mlp.linear_fc1.up.adapter.linear_in.weight"] == (32, H)
    assert len(trained) == 2 * 7
    saved = [
        sum(held(_modules(one)["layer.0"].steady.forward, category) for category in Category)  # type: ignore[attr-defined]
        for one in (usual, apart)
    ]
    assert saved[1] - saved[0] == 3 * 2 * 1024 * 32


@pytest.mark.parametrize("zero", ["0", "1"])
def test_states_by_hand(zero: str) -> None:
    """Frozen parameters are tensors of their own in 2 bytes; buffers, main parameters and moments are of adapters."""
    (program,) = made(zero=zero)
    assert program.kept is not None
    frozen = [2 * VOCAB * H] * 2 + [2 * H] + [2 * n * k for n, k in OF_LAYER] * 2 + [2 * H] * 4
    adapters = [32 * k for _, k in OF_LAYER] * 2 + [32 * n for n, _ in OF_LAYER] * 2
    count = sum(adapters)
    kept = program.kept
    assert held(kept.construction, Category.PARAMETERS) == sum(map(rounded, frozen)) + 2 * count
    assert held(kept.construction, Category.GRADIENTS) == 4 * count
    assert held(kept.construction, Category.MAIN_PARAMETERS) == 4 * count
    assert held(kept.states, Category.OPTIMIZER_STATES) == 8 * count


def test_ranks_divide_both_matrices() -> None:
    """A (r / t, k) or (r, k / t), B (n / t, r)."""
    (program,) = made(tp="2", gpus="2", sequence_parallel="true")
    module = next(span.module for span in program.order.chunks[0].spans if span.names[0].startswith("layer"))
    found = {one.name: one.shape for one in module.parameters if one.trained}
    assert found == {
        "self_attention.linear_proj.adapter.linear_in.weight": (32, H // 2),
        "self_attention.linear_proj.adapter.linear_out.weight": (H // 2, 32),
        "self_attention.linear_qkv.adapter.linear_in.weight": (16, H),
        "self_attention.linear_qkv.adapter.linear_out.weight": (QKV // 2, 32),
        "mlp.linear_fc1.adapter.linear_in.weight": (16, H),
        "mlp.linear_fc1.adapter.linear_out.weight": (F, 32),
        "mlp.linear_fc2.adapter.linear_in.weight": (32, F // 2),
        "mlp.linear_fc2.adapter.linear_out.weight": (H // 2, 32),
    }


def _modules(program: Program) -> dict[str, object]:
    spans = program.order.chunks[0].spans
    return {name: span.module for span in spans for name in span.names}


def test_the_first_layer_has_no_gradient_of_its_input() -> None:
    """The embedding is frozen; recompute of whole layers makes its output a leaf (``recompute.py``)."""
    (plain,), (again,) = made(), made(recompute="full")
    of, other = _modules(plain), _modules(again)
    assert of["embedding"].first.backward == ()  # type: ignore[attr-defined]
    assert of["layer.0"].first.grad_input == 0 != of["layer.1"].first.grad_input  # type: ignore[attr-defined]
    assert other["layer.0"] is other["layer.1"]
    assert other["embedding"].first.backward != ()  # type: ignore[attr-defined]


def test_stages_behind_the_first_have_gradients_of_what_they_receive() -> None:
    _, second = made(pp="2", gpus="2")
    assert _modules(second)["layer.1"].first.grad_input  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"recompute": "full"},
        {"pp": "2", "gpus": "2"},
        {"fp8": "tensorwise"},
        GRAPHS,
        {"lora_targets": PARTS, "tp": "2", "gpus": "2"},
        {**EXPERTS, "fp8": "tensorwise"},
        HYBRID,
    ],
)
def test_search_folds_what_an_estimate_folds(flags: dict[str, str]) -> None:
    plan = plan_of(**flags)
    peaks = [fold_program(one).peak for one in made(**flags)]
    assert framework("megatron").search.fullest(plan)[0] == max(peaks)


def test_frozen_parameters_in_8_bits_stay_where_they_are() -> None:
    """On a Hopper both orientations of each weight of a layer, a byte an element, and a scale; nothing in buffers."""
    (program,) = made(fp8="tensorwise", fp8_parameters="true", zero="1")
    assert program.kept is not None
    weights = [rounded(n * k) * 2 + 512 for n, k in OF_LAYER] * 2
    others = [2 * VOCAB * H] * 2 + [2 * H] * 5
    count = 2 * sum(32 * (n + k) for n, k in OF_LAYER)
    expected = sum(weights) + sum(map(rounded, others)) + 2 * count
    assert held(program.kept.construction, Category.PARAMETERS) == expected
    assert held(program.kept.construction, Category.GRADIENTS) == 4 * count


def test_experts_of_a_rank_share_adapters() -> None:
    """Qwen3 30B A3B: 128 experts of 768 features, 32 on a rank; 2,048 hidden. Attention: 32 + 2 x 4 heads of 128. The
    adapters of experts are other ranks' than those of attention, in a buffer of their own."""
    plan, (program,) = plan_of(**EXPERTS), made(**EXPERTS)
    of_experts, of_attention = 32 * (2 * 768 + 2048) + 32 * (2048 + 768), 32 * (5120 + 2048) + 32 * (2048 + 4096)
    assert adapter_parameters(plan) == 2 * (of_experts + of_attention)
    module = _modules(program)["layer.0"]
    trained = [one for one in module.parameters if one.trained]  # type: ignore[attr-defined]
    assert sum(one.elements for one in trained if one.expert) == of_experts
    assert sum(one.elements for one in trained if not one.expert) == of_attention
    assert sum("experts.linear_fc1.weight" in one.name for one in module.parameters) == 32  # type: ignore[attr-defined]
    assert program.kept is not None
    assert held(program.kept.construction, Category.GRADIENTS) == 4 * 2 * (of_experts + of_attention)


def test_experts_of_projected_rows_and_shared_ones_beside_the_exchange() -> None:
    """Nemotron 3 Super: experts of 2,688 features read rows of 1,024 that frozen projections of 4,096 make; shared
    ones, of 5,376, read 4,096. Moonlight's shared experts (2 of 1,408) make the same beside the exchange of tokens as
    without it, unless ranks share a sequence, whose parts are gathered apart there."""
    latent = {"model": "nemotron-3-super-120b-a12b", "layers": "2", "layer_pattern": "*E", "mtp_layers": "0"}
    count = adapter_parameters(plan_of(**latent, ep="8", gpus="8", gbs="8", lora_targets="linear_fc1,linear_fc2"))
    assert count == 32 * 2 * (2688 + 1024) + 32 * 2 * (5376 + 4096)
    shared = {"model": "moonlight-16b", "layers": "2", "ep": "2", "gpus": "2", "lora_targets": "linear_fc1,linear_fc2"}
    usual, beside = (fold_program(made(**shared, moe_shared_expert_overlap=on)[0]).peak for on in ("false", "true"))
    assert usual == beside
    with pytest.raises(PlanError, match="shared_expert_overlap = true: is not modelled yet with adapters"):
        plan_of(**shared | {"tp": "2", "etp": "1", "sequence_parallel": "true"}, moe_shared_expert_overlap="true")


def test_layers_that_predict_further_tokens_have_adapters() -> None:
    """By the last part of their names, as all linear layers: GLM-4.5 Air, 96 + 2 x 8 heads of 128 over 4,096 features,
    has a third layer of attention beside two; of Nemotron 3.5 the one pair of layers, attention and experts, that all
    depths share. Norms, ``eh_proj`` and the embedding are frozen: what is looked up needs no gradient."""
    glm = {"model": "glm-4.5-air", "layers": "2", "mtp_layers": "1", "ep": "4", "gpus": "4", "gbs": "4"}
    of_attention = 32 * (112 * 128 + 4096) + 32 * (4096 + 96 * 128)
    assert adapter_parameters(plan_of(**glm, lora_targets="linear_qkv,linear_proj")) == 3 * of_attention
    (program,) = made(**glm, lora_targets="linear_qkv,linear_proj")
    further = _modules(program)["mtp"]
    trained = [one for one in further.parameters if one.trained]  # type: ignore[attr-defined]
    assert sum(one.elements for one in trained) == of_attention
    made_of = {one.name for one in further.steady.backward if isinstance(one, Hold)}  # type: ignore[attr-defined]
    assert "grad_enorm_input" not in made_of
    assert "grad_hnorm_input" in made_of
    shared = {**HYBRID, "mtp_layers": "2", "mtp_pattern": "*E", "mtp_shared": "true", "lora_targets": "linear_qkv"}
    assert adapter_parameters(plan_of(**shared)) == 2 * adapter_parameters(plan_of(**HYBRID, lora_targets="linear_qkv"))


def test_layers_of_other_kinds() -> None:
    """Nemotron 3 Nano: 2,688 hidden; 64 heads of 64 in Mamba layers, 8 groups with states of 128; 32 + 2 x 2 heads of
    128 in attention. Moonlight: 16 heads of 128 + 64, values of 128, keys and values from 512 + 64."""
    inner = 64 * 64
    of_mamba = 32 * (2 * inner + 2 * 8 * 128 + 64 + 2688) + 32 * (2688 + inner)
    assert adapter_parameters(plan_of(**HYBRID, lora_targets="in_proj,out_proj")) == 2 * of_mamba
    assert adapter_parameters(plan_of(**HYBRID, lora_targets="linear_qkv")) == 32 * (36 * 128 + 2688)
    latent = {"model": "moonlight-16b", "lora_targets": "linear_q_proj,linear_kv_down_proj,linear_kv_up_proj"}
    of_layer = 32 * (16 * 192 + 2048) + 32 * (576 + 2048) + 32 * (16 * 256 + 512)
    assert adapter_parameters(plan_of(**latent)) == 2 * of_layer
    of_others = 32 * (
        2048 + 16 * 128
    )  # Bridge's default names a layer that latent attention has not, which is no error
    dense = {**latent, "layers": "1", "lora_targets": "linear_qkv,linear_proj"}
    assert adapter_parameters(plan_of(**dense)) == of_others
    assert "linear_qkv" not in (plan_of(model="moonlight-16b", layers="1").lora.targets or ())


def test_graphs_of_frozen_mlps_by_hand() -> None:
    """Two layers of 1,024 tokens have an input each that stays, (1024, 1, H) in bf16, beside the gradients of an output
    and of an input; what attention made ends in their place. From forward to backward a graph's pool holds the norm's
    statistics in fp32, the product (1024, 1, 2 F) before the gate, and the layer's output, and no adapter's tensor."""
    (graphed,), (plain,) = made(**GRAPHS), made(lora_targets="linear_qkv")
    hidden = 2 * 1024 * H
    assert static(graphed).net - static(plain).net == (2 + 2) * hidden
    for name in ("layer.0", "layer.1"):
        tapes, usual = (_modules(one)[name].steady for one in (graphed, plain))  # type: ignore[attr-defined]
        assert usual.forward_fold.net - tapes.forward_fold.net == hidden
        ended = {event.tensor for event in tapes.forward if isinstance(event, Drop)}
        pooled = [one for one in (*tapes.forward, *tapes.backward) if isinstance(one, Hold) and one.stream == POOL]
        kept = [one.bytes for one in pooled if one in tapes.forward and one.tensor not in ended]
        assert sorted(kept) == [4 * 1024, hidden, 2 * 1024 * 2 * F]
        assert not any("adapter" in one.name for one in pooled)
        assert {one.name for one in pooled if one in tapes.backward} == {
            f"grad_mlp.{one}"
            for one in (
                *("linear_fc2_input", "linear_fc1_swiglu", "linear_fc1_input"),
                *("linear_fc1.layer_norm_input", "linear_fc1.layer_norm_parameter"),
            )
        }


def test_layers_before_the_first_adapter_have_no_backward() -> None:
    (program,) = made(**HYBRID, lora_targets="linear_qkv")
    backwards = {name: bool(one.first.backward) for name, one in _modules(program).items() if "layer" in name}  # type: ignore[attr-defined]
    assert backwards == {f"layer.{at}": at >= 2 for at in range(6)}


@pytest.mark.parametrize("tp", ["1", "2"])
def test_products_by_hand(tp: str) -> None:
    """Of 1,024 tokens: forward 2 n k each, backward as much again for inputs, and for both gradients of A and B."""
    plan = plan_of(tp=tp, gpus=tp, sequence_parallel="true" if tp == "2" else "false")
    work, t = framework("megatron").time.entries(plan).layer, int(tp)

    def flops(kernels: Counted) -> float:
        return sum(times * one.flops for one, times in kernels if isinstance(one, Product))

    base = sum(2 * 1024 * n * k for n, k in OF_LAYER) / t
    adapters = sum(2 * 1024 * 32 * (n + k) for n, k in OF_LAYER) / t
    assert flops(work.forward) == base + adapters
    assert flops(work.backward) == base + 2 * adapters


def test_a_stage_of_the_embedding_alone_has_no_backward() -> None:
    """``backward_step`` skips an output that requires no gradient; what is received of one ends unread."""
    layout = {"pp": "4", "gpus": "4", "gbs": "8", "pipeline_layout": "E|t|t|L"}
    first, *rest = made(**layout)
    assert not any(one.first.backward for one in _modules(first).values() if one.parameters)  # type: ignore[attr-defined]
    assert first.kept is not None
    assert held(first.kept.construction, Category.GRADIENTS) == 0
    assert framework("megatron").search.fullest(plan_of(**layout))[0] == max(
        fold_program(one).peak for one in (first, *rest)
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({**HYBRID, "recompute": "full"}, "recompute.mode = full: is not modelled yet with adapters"),
        ({**EXPERTS, "moe_grouped_gemm": "false"}, "experts.grouped_gemm = false: is not modelled yet with adapters"),
        (
            {"model": "moonlight-16b", "recompute": "selective", "recompute_modules": "layernorm"},
            "recompute.modules = .*: is not modelled yet with adapters",
        ),
        (
            {**EXPERTS, "recompute": "selective", "recompute_modules": "moe_act", "lora_targets": "linear_fc2"},
            "recompute.modules = .*: is not modelled yet with adapters",
        ),
        ({"lora_targets": "q_proj"}, "lora.targets = q_proj: must be among linear_qkv, linear_proj"),
        (
            {"model": "moonlight-16b", "lora_targets": "linear_qkv"},
            "lora.targets = linear_qkv: must be among linear_proj",
        ),
        ({"use_dora": "true", "lora_dropout": "0.1"}, "lora.dora = true: must be false with lora.dropout"),
        ({"use_dora": "true", "fp8": "tensorwise"}, "lora.dora = true: must be false with fp8 or fp4"),
        ({"use_dora": "true", **EXPERTS}, "lora.dora = true: must be false with adapters of experts"),
        ({"use_dora": "true", "model": "moonlight-16b", "lora_targets": "linear_proj"}, "must be false with latent"),
        ({"lora_targets": "linear_q,linear_k"}, "must have all of linear_q, linear_k, linear_v, or none"),
        (
            {"lora_targets": "linear_fc1_up,linear_fc1_gate,linear_fc1"},
            "must not name linear_fc1 beside parts of layers",
        ),
        ({"lora_targets": PARTS, "use_dora": "true"}, "lora.dora = true: must be false with parts of layers"),
        ({"lora_targets": PARTS, "tp": "4", "gpus": "4", "seq": "1022"}, "layout.tp = 4: must divide a rank's 1022"),
        (
            {**EXPERTS, "lora_targets": "linear_q,linear_k,linear_v"},
            "lora.targets = linear_q: must be among linear_qkv",
        ),
        ({"lora_dtype": "fp32"}, "lora.dtype = fp32: must be bf16: adapters are in the model's dtype"),
        ({"lora_rank": "30", "tp": "4", "gpus": "4"}, "lora.rank = 30: must be a multiple of tp 4"),
        ({"megatron_fsdp": "optim"}, "megatron.fsdp = optim: is not modelled yet with adapters"),
        (
            {**GRAPHS, "lora_targets": "linear_qkv,linear_fc1"},
            "megatron.cuda_graphs = transformer_engine: is not modelled",
        ),
        ({**GRAPHS, "cuda_graph_modules": "attn"}, "transformer_engine of mlp alone .* is, where attention alone has"),
        ({**GRAPHS, "cuda_graph_impl": "local"}, "megatron.cuda_graphs = local: is not modelled yet with adapters"),
        ({"transformer_impl": "local"}, "megatron.transformer_impl = local: is not modelled yet with adapters"),
        ({"model": "bert-large", "seq": "512"}, "is not modelled yet with adapters"),
        ({"optimizer": "muon"}, "optimizer.name = muon: is not modelled yet with adapters"),
    ],
)
def test_what_is_not_modelled_is_refused(flags: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem.replace(".", r"\.").replace(r"\.*", ".*")):
        plan_of(**flags)
