"""Scripts in the style of Megatron's examples become the plans that their authors meant."""

# ruff: noqa: E501 (tables of scripts, arguments and the lines that they get)

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.arguments import plan_of_arguments
from memplan.commands.launched import LaunchFlags, read_given
from memplan.formats import reader
from memplan.formats.files import read_words
from memplan.formats.launch import Asked, launched_plan
from memplan.formats.slurm import with_gpu_of_job
from memplan.formats.training_scripts import launched
from memplan.plan.errors import PlanError
from memplan.plan.notes import notes_of
from memplan.plan.read import build_plan
from memplan.plan.resolve import resolve

from ...plan.outcomes import error_of
from .reading import launch, plan
from .scripts import BERT, GPT, LLAMA, SMALL, script

FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"


def small(arguments: str) -> str:
    return script(arguments=arguments)


def test_gpt() -> None:
    read = launch(GPT)
    built = build_plan(read.source, {}).plan
    spec = built.model
    assert (spec.family, spec.layers, spec.hidden, spec.ffn, spec.heads, spec.kv_heads, spec.head_dim) == (
        "gpt", 24, 2048, 8192, 16, 16, 128,
    )  # fmt: skip
    assert (spec.positions, spec.positions_max, spec.norm, spec.activation) == ("learned", 2048, "layernorm", "gelu")
    assert (spec.hidden_dropout, spec.attention_dropout, spec.embedding_dropout) == (0.1, 0.1, 0.1)
    assert (built.hardware.gpus, built.hardware.gpus_per_node) == (16, 8)
    layout = built.layout
    assert (layout.tp, layout.pp, layout.zero, layout.sequence_parallel, layout.vpp) == (2, 4, 1, True, 1)
    assert (built.batch.mbs, built.batch.gbs, built.batch.seq) == (2, 64, 2048)
    assert (built.precision.dtype, built.precision.gradients, built.optimizer.name) == ("bf16", "fp32", "adam")
    assert built.environment == {}, "CUDA_DEVICE_MAX_CONNECTIONS changes no memory"
    assert [note.message for note in read.notes] == ["not set, and not needed for memory: $2, $1"]
    assert resolve(built).layout.dp == 2


def test_llama() -> None:
    precision = build_plan(launch(LLAMA, vocabulary=None).source, {}).plan.precision
    assert (precision.fp8, precision.fp8_format, precision.fp8_parameters) == ("delayed", "hybrid", True)
    assert precision.amax_history == 1, "unless --fp8-amax-history-len says otherwise"
    read = launch(LLAMA, vocabulary=None, variables={"DTYPE": "bf16"})
    built = build_plan(read.source, {}).plan
    spec = built.model
    assert (spec.norm, spec.activation, spec.positions, spec.kv_heads, spec.ffn) == (
        "rmsnorm",
        "swiglu",
        "rotary",
        8,
        14336,
    )
    assert (spec.vocab, spec.tied_embeddings, spec.attention_bias, spec.mlp_bias) == (128256, False, False, False)
    assert not built.layout.sequence_parallel, "off with one tensor-parallel rank"
    assert built.megatron.cross_entropy_fusion == "native"
    assert not built.megatron.bias_gelu_fusion, "off without biases"
    assert not built.megatron.attention_mask_in_dataloader
    assert read.notes == ()


def test_bert() -> None:
    built = build_plan(launch(BERT, vocabulary=29056).source, {}).plan
    assert (built.model.family, built.model.causal, built.model.mlm_head, built.model.token_types) == (
        "bert",
        False,
        True,
        2,
    )
    assert (built.megatron.transformer_impl, built.megatron.attention_backend) == ("local", "local")
    assert (built.precision.dtype, built.precision.gradients, built.megatron.check_for_nan) == ("fp16", "fp16", False)
    assert built.megatron.log_params_norm
    assert built.environment == {"NVTE_FLASH_ATTN": "0"}
    assert built.hardware.gpus == 4
    expected = "train.sh:10: --vocab-size: is needed: only the tokenizer knows it, and BertWordPieceLowerCase my vocab.txt is not here"
    assert error_of(lambda: launch(BERT, vocabulary=None)).startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ("--swiglu", "model.ffn", 128),
        ("--swiglu --hidden-size 4096", "model.ffn", 10880),
        ("--kv-channels 32", "model.head_dim", 32),
        ("--group-query-attention", "model.kv_heads", 1),
        ("--num-query-groups 2", "model.kv_heads", 4),
        ("--group-query-attention --num-query-groups 2", "model.kv_heads", 2),
        ("--add-qkv-bias --disable-bias-linear", "model.attention_bias", True),
        ("--use-rotary-position-embeddings", "model.positions", "rotary"),
        ("--position-embedding-type none", "model.positions", "none"),
        ("--hidden-dropout 0", "model.embedding_dropout", 0.0),
        ("--bf16 --grad-reduce-in-bf16", "precision.gradients", "bf16"),
        ("--bf16 --main-grads-dtype bf16 --use-precision-aware-optimizer", "precision.gradients", "bf16"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "precision.gradients", "bf16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "precision.gradients", "fp32"),
        ("", "precision.dtype", "fp32"),
        ("--fp16 --loss-scale 1024", "megatron.check_for_nan", True),
        ("", "batch.gbs", 8),
        ("--micro-batch-size 2 --tensor-model-parallel-size 4", "batch.gbs", 4),
        ("--recompute-activations", "recompute.mode", "selective"),
        ("--recompute-granularity selective --recompute-modules layernorm shared_experts", "recompute.modules", ("layernorm",)),
        ("--num-experts 8 --moe-layer-recompute", "recompute.mode", "selective"),
        ("--num-experts 8 --moe-layer-recompute", "recompute.modules", ("core_attn", "moe")),
        ("--num-experts 8 --moe-layer-recompute --recompute-modules moe layernorm", "recompute.modules", ("moe", "layernorm")),
        ("--moe-layer-recompute", "recompute.modules", ("core_attn",)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "recompute.layers", 2),
        ("--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "layout.vpp", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 4", "layout.vpp", 4),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|(tt|)*6L'", "layout.vpp", 4),
        ("--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "layout.vpp", 2),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", "pipeline.overlap_p2p", False),
        ("--no-overlap-p2p-communication", "pipeline.overlap_p2p", True),
        ("--decoder-first-pipeline-num-layers 3", "pipeline.first_layers", 3),
        ("--transformer-impl local", "megatron.transformer_impl", "local"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "megatron.cross_entropy_fusion", "te"),
        ("--cross-entropy-fusion-impl te", "megatron.cross_entropy_fusion", "none"),
        ("--apply-query-key-layer-scaling", "megatron.attention_softmax_in_fp32", True),
        ("--no-rope-fusion", "megatron.rope_fusion", False),
        ("--context-parallel-size 2 --cp-comm-type a2a", "megatron.cp_communication", "a2a"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            "megatron.cp_inner",
            2,
        ),
        ("--clip-grad 0", "megatron.clip_grad", 0.0),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "recompute.mode", "none"),
        ("--mtp-num-layers 0", "model.layers", 2),
        ("--ddp-bucket-size 1000", "megatron.bucket_size", 1000),
        ("--ddp-num-buckets 8", "megatron.buckets", 8),
        ("--no-clone-scatter-output-in-embedding", "megatron.clone_scattered_embedding", False),
        ("--log-max-attention-logit", "megatron.largest_logit", True),
        ("--qk-clip", "megatron.clips_queries", True),
        ("--use-sharp --sharp-enabled-group dp", "megatron.sharp", True),
        ("--use-transformer-engine-op-fuser", "megatron.fuses_operations", True),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn --cuda-graph-warmup-steps 0", "megatron.cuda_graph_warmup", 0),
        ("--dataloader-inter-document-masking", "megatron.packed", True),
        ("--sft --no-create-attention-mask-in-dataloader", "megatron.packed", True),
        ("--mtp-num-layers 2 --position-embedding-type rope --mtp-hsm", "megatron.mixes_states", True),
        ("--mtp-num-layers 1 --position-embedding-type rope --mtp-hsm", "megatron.mixes_states", False),
        ("--mtp-num-layers 1 --position-embedding-type rope --mtp-detach-heads", "megatron.detaches_heads", True),
        ("--mtp-detach-heads", "megatron.detaches_heads", False),
        ("--use-nccl-ub", "megatron.registers_buffers", True),
        ("--ddp-reduce-scatter-with-fp32-accumulation", "megatron.sums_in_fp32", True),
        ("--ddp-param-name-patterns-for-fp32-local-accumulation all *router*", "megatron.fp32_gradients_of", ("all", "*router*")),
        ("--use-te-activation-func", "megatron.te_activation", True),
        ("--fused-residual-rmsnorm", "megatron.norm_takes_residual", True),
        ("--multi-latent-attention --q-lora-rank 8", "model.attention_bias", False),
        ("--multi-latent-attention --q-lora-rank 8", "model.attention_output_bias", True),
        ("--multi-latent-attention --q-lora-rank 8 --mla-down-proj-fusion", "megatron.joint_latent_down", True),
        ("--attention-output-gate", "model.attention_gate", True),
        ("--output-logit-dtype fp32", "megatron.logits_dtype", "fp32"),
        ("--mlp-chunks-for-training 4", "megatron.mlp_chunks", 4),
        ("--eval-micro-batch-size 4", "trainer.evaluation_mbs", 4),
        ("--make-vocab-size-divisible-by 64", "megatron.vocab_multiple", 64),
        ("--deterministic-mode", "megatron.deterministic", True),
        ("--optimizer muon --use-distributed-optimizer", "layout.zero", 1),
        ("--optimizer muon", "layout.zero", 0),
        ("--optimizer dist_muon", "layout.zero", 1),  # validate_args: use_layer_wise_distributed_optimizer
    ],
)  # fmt: skip
def test_derivations(arguments: str, path: str, value: object) -> None:
    found: object = plan(small(arguments))
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--num-layers many", "train.sh:2: --num-layers = many: must be a whole number"),
        ("--num-layers", "train.sh:2: --num-layers: needs a value"),
        ("--num-layers $N", "train.sh:2: --num-layers: is needed, and $N is not set in the script; give it as --set N=value"),
        ("--num-layers $(nproc)", "train.sh:2: --num-layers: is needed, and $(nproc) is the output of a command, which is not run"),
        ("--normalization RMSNrom", "train.sh:2: --normalization = RMSNrom: must be one of LayerNorm, RMSNorm; did you mean RMSNorm?"),
        ("--num-attention-heads 5", "--num-attention-heads = 5: must divide --hidden-size 64 unless --kv-channels is given"),
        ("--fp16 --bf16", "--fp16: must be left out with --bf16"),
        ("--num-experts 8 --moe-enable-deepep", "--moe-enable-deepep: needs --moe-token-dispatcher-type flex: Megatron stops"),
        ("--num-experts 8 --moe-layer-recompute --recompute-granularity full", "--moe-layer-recompute: must be left out with full"),
        ("--num-experts 8 --moe-layer-freq [1,2]", "--moe-layer-freq = [1,2]: must be a whole number, or a list of 2 zeros and ones"),
        ("--num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss", "is not modelled yet with several kinds of losses"),
        ("--num-experts 8 --moe-use-grouped-tensor --moe-single-grouped-weight", "it is not modelled yet with --moe-use-grouped"),
        ("--optimizer soap", "--optimizer = soap: is not modelled yet; adam, sgd and muon are"),
        ("--position-embedding-type mrope", "--position-embedding-type = mrope: is not modelled yet; learned_absolute, rope"),
        ("--recompute-granularity full", "--recompute-method: is missing"),
        ("--skip-train", "--skip-train: must be left out: nothing is trained with it"),
        ("--logits-load-dir teacher", "--logits-load-dir: must be left out: logits of a teacher"),
        ("--export-kd-teacher-load teacher", "--export-kd-teacher-load: is distillation, and its teacher"),
        ("--language-model-type mistral_7b", "--language-model-type: belongs to models that see or hear"),
        ("--model-provider llava_vlm", "--model-provider: belongs to models that see or hear"),
        ("--model-provider hybrid", "or to scripts that run a model alone"),
        (
            "--fine-grained-activation-offloading --offload-modules foo",
            "--offload-modules = foo: must be one of attn_norm,",
        ),
        ("--fine-grained-activation-offloading --offload-modules gdp_qkv", "gdp_qkv: is not modelled yet"),
        (
            "--recompute-granularity selective --recompute-modules core_atn",
            "--recompute-modules = core_atn: must be one of core_attn,",
        ),
        ("--flextron", "--flextron: belongs to elastic models"),
        ("--batch-size 4", "--batch-size: was renamed long ago, and Megatron stops"),
        ("--hybrid-context-parallel", "--hybrid-context-parallel: must be left out: Megatron-LM stops in its first pass"),
        ("--enable-mhc-connections", "--enable-mhc-connections: must be left out: Megatron-LM stops, because no script"),
        (
            "--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 3",
            "--tensor-parallel-num-weight-shards = 3: must be a multiple of --tensor-model-parallel-size, which is 2",
        ),
        (
            "--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 8",
            "--tensor-parallel-num-weight-shards = 8: must be 2, as --tensor-model-parallel-size: weights in more",
        ),
        (
            "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-tensor-parallel-num-weight-shards 2",
            "--expert-tensor-parallel-num-weight-shards = 2: must be 1, as --expert-tensor-parallel-size: weights in",
        ),
        ("--use-torch-fsdp2", "train.sh:2: --no-gradient-accumulation-fusion: is missing: --use-torch-fsdp2 needs it"),
        (f"{FSDP2} --use-distributed-optimizer", "--use-torch-fsdp2: must be left out with --use-distributed-optimizer"),
        (f"{FSDP2} --use-megatron-fsdp", "--use-torch-fsdp2: must be left out with --use-megatron-fsdp: there is one or"),
        (f"{FSDP2} --fp16", "--use-torch-fsdp2: must be left out with --fp16: Megatron-LM stops"),
        (f"{FSDP2} --init-model-with-meta-device", "--use-torch-fsdp2: must be left out with --init-model-with-meta-device"),
        (f"{FSDP2} --ckpt-format torch", "--ckpt-format = torch: must be torch_dist or torch_dcp with --use-torch-fsdp2"),
        (
            "--use-megatron-fsdp --megatron-fsdp-version 2",
            "train.sh:2: --megatron-fsdp-version = 2: is not modelled yet",
        ),
        (
            "--use-megatron-fsdp --ckpt-format torch_dist",
            "--ckpt-format = torch_dist: must be fsdp_dtensor with --use-megatron-fsdp",
        ),
        (
            "--use-megatron-fsdp --megatron-fsdp-main-params-dtype bf16",
            "train.sh:2: --megatron-fsdp-main-params-dtype = bf16: is not modelled yet; fp32 is",
        ),
        (
            "--use-torch-fsdp2 --no-gradient-accumulation-fusion",
            "--untie-embeddings-and-output-weights: is missing: --use-torch-fsdp2 needs it",
        ),
        ("--context-parallel-size 2 --cp-comm-type a2a p2p", "--cp-comm-type = a2a p2p: is not modelled yet; p2p, a2a"),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "must be two sizes with the product 2"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
            "--hierarchical-context-parallel-sizes = 2 4: must be two sizes with the product 4",
        ),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 0", "recompute.layers = 0: must be at least 1"),
        ("--spec my.module spec", "--spec = my.module: names a specification of layers"),
        ("--pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 1", "train.sh:2: --num-layers-per-virtual-pipeline-stage = 1: "),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et|t|L'", "has 3 stages, which the 2 ranks"),
        ("--pipeline-model-parallel-layout '(t)*99999999999'", "train.sh:2: --pipeline-model-parallel-layout = (t)*99999999999: repeats t"),
        ("--tensor-model-parallel-size 0", "train.sh:2: --tensor-model-parallel-size = 0: must be at least 1"),
        ("--hidden-dropout 2", "train.sh:2: model.embedding_dropout = 2.0: must be less than 1"),
        ("--hidden-size 64.0", "--hidden-size = 64.0: must be a whole number"),
    ],
)  # fmt: skip
def test_what_is_refused_with_its_line(arguments: str, line: str) -> None:
    assert line in error_of(lambda: plan(small(arguments)))


TE_LAYERS = "--export-default-te-spec"


def finetune(arguments: str) -> str:
    """``finetune.py`` of Megatron-LM's ``examples/post_training/modelopt``, as ``finetune.sh`` there starts it."""
    started = "examples/post_training/modelopt/finetune.py"
    return small(f"--export-te-mcore-model {arguments}").replace("pretrain_gpt.py", started)


def test_modelopt_trains_transformer_engines_layers_where_it_is_told_to() -> None:
    """``modelopt_gpt_hybrid_builder``: ``get_gpt_layer_with_transformer_engine_spec`` with ``--export-default-te-spec``,
    which is ``pretrain_gpt.py``'s; which data is read changes nothing."""
    data = "--finetune-hf-dataset nvidia/data --finetune-data-split train"
    experts = "--num-experts 4 --moe-grouped-gemm"
    for given in ("", experts, f"{experts} --moe-layer-freq 1"):
        here, there = plan(finetune(f"{TE_LAYERS} {data} {given}")), plan(small(given))
        named = there.model.model_copy(update={"name": "finetune"})
        assert here == there.model_copy(update={"model": named})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", f"train.sh:2: starts ModelOpt's finetune.py, whose layers are its own (get_gpt_modelopt_spec: linear layers and experts of Megatron's), not estimated; with {TE_LAYERS} they are"),
        (f"{TE_LAYERS} --export-qk-l2-norm", "train.sh:2: --export-qk-l2-norm: must be left out with finetune.py: its GPT as"),
        (f"{TE_LAYERS} --hybrid-override-pattern M*", "train.sh:2: --hybrid-override-pattern: must be left out with finetune.py"),
        (f"{TE_LAYERS} --num-experts 4", "train.sh:2: --moe-grouped-gemm: is needed with finetune.py, which groups"),
        (f"{TE_LAYERS} --num-experts 4 --moe-grouped-gemm --moe-layer-freq [0,1]", "train.sh:2: --moe-layer-freq = [0,1]: must be 1 or left out with finetune.py, which gives every layer experts"),
        (f"{TE_LAYERS} --transformer-impl local", f"train.sh:2: --transformer-impl = local: must be transformer_engine with {TE_LAYERS}"),
    ],
)  # fmt: skip
def test_modelopts_own_layers_are_refused(arguments: str, line: str) -> None:
    assert line in error_of(lambda: plan(finetune(arguments)))


def test_arguments_alone_that_only_modelopt_has_are_its() -> None:
    words = f"--bf16 {SMALL} --vocab-size 128 --finetune-hf-dataset nvidia/data".replace(" --", "\n--")
    assert "whose layers are its own" in error_of(lambda: plan(words))


@pytest.mark.parametrize("name", ["--moe-dispatch-fwd-dtype", "--moe-combine-bwd-dtype"])
def test_rows_of_experts_in_8_bits_are_refused(name: str) -> None:
    """``TransformerConfig.__post_init__`` wants NCCL's dispatcher for them."""
    assert not launch(small(f"{name} bf16")).notes
    assert f"{name}: must be left out, or bf16: rows in 8 bits need" in error_of(lambda: launch(small(f"{name} mxfp8")))


def test_as_many_weight_shards_as_ranks_change_nothing() -> None:
    read = launch(small("--tensor-model-parallel-size 2 --tensor-parallel-num-weight-shards 2"))
    assert not read.notes
    rows = [row.became for row in read.explained if row.name == "--tensor-parallel-num-weight-shards"]
    assert rows == ["as many shards as --tensor-model-parallel-size has ranks: nothing is gathered"]


def test_weights_are_not_stored_in_8_bits_beside_fsdp2() -> None:
    """``validate_args`` turns it off."""
    precision = plan(small(f"{FSDP2} --fp8-format hybrid --fp8-param-gather")).precision
    assert (precision.fp8, precision.fp8_parameters) == ("delayed", False)


def test_layers_on_the_host() -> None:
    assert plan(small("--cpu-offloading-num-layers 2 --bf16")).megatron.offload_layers == 2
    assert plan(small("--cpu-offloading-num-layers 0 --bf16")).megatron.offload_layers == 0


def test_fsdp2_of_pytorch() -> None:
    """Beside it gradients have the parameters' dtype, whatever other arguments say of them."""
    found = plan(small(f"{FSDP2} --bf16 --accumulate-allreduce-grads-in-fp32"))
    assert (found.megatron.torch_fsdp, found.precision.gradients) == ("reshard", "bf16")
    assert not found.megatron.gradient_accumulation_fusion
    found = plan(small(f"{FSDP2} --torch-fsdp2-no-reshard-after-forward --use-cpu-initialization"))
    assert (found.megatron.torch_fsdp, found.megatron.torch_fsdp_host_init) == ("keep", True)
    found = plan(small("--torch-fsdp2-no-reshard-after-forward --use-cpu-initialization"))
    assert (found.megatron.torch_fsdp, found.megatron.torch_fsdp_host_init) == ("none", False)
    content = script("export CUDA_DEVICE_MAX_CONNECTIONS=1", "", arguments=FSDP2)
    assert "CUDA_DEVICE_MAX_CONNECTIONS = 1: must be left out or above 1 with --use-torch-fsdp2" in error_of(
        lambda: plan(content)
    )
    assert plan(content.replace("=1\n", "=8\n")).megatron.torch_fsdp == "reshard"


def test_values_name_the_line_that_wrote_them() -> None:
    content = script("TP=4", "", "LAYERS=$((2 * x))", arguments="--tensor-model-parallel-size $TP")
    read = launch(content)
    assert str(dict(read.source.plan.origins())["layout.tp"]) == "train.sh:2"
    assert error_of(lambda: build_plan(launch(content.replace("TP=4", "TP=-4")).source, {})) == (
        "train.sh:2: --tensor-model-parallel-size = -4: must be at least 1"
    )
    assert error_of(lambda: plan(script("N=$1", arguments="--num-layers $N"))).endswith("give it as --set 1=value")
    assert plan(script("N=x", arguments="--bf16")).precision.dtype == "bf16"


def test_the_last_of_repeated_arguments_wins() -> None:
    read = launch(small("--bf16 --seq-length 16 --seq-length=8"))
    assert build_plan(read.source, {}).plan.batch.seq == 8
    rows = [(row.value, row.became) for row in read.explained if row.name == "--seq-length"]
    assert rows == [
        ("32", "replaced by the one at train.sh:2"),
        ("16", "replaced by the one at train.sh:2"),
        ("8", "batch.seq = 8"),
    ]


def test_misspelt_arguments_that_change_memory_are_errors() -> None:
    line = error_of(
        lambda: launch(small("--hiden-size 8 --recompute_granularty full --my-fork-flag --use-flash-attn-2"))
    )
    assert line.startswith(
        "2 errors: (1) train.sh:2: --hiden-size: is not an argument of megatron; did you mean --hidden-"
    )
    assert "--recompute_granularty: is not an argument of megatron; did you mean --recompute-granularity?" in line


def test_yarn_stretches_positions_by_a_factor() -> None:
    def factor(arguments: str) -> object:
        return build_plan(launch(small(arguments)).source, {}).plan.model.yarn_factor

    scaled = "--rotary-scaling-factor 32"
    assert factor(f"--position-embedding-type yarn {scaled}") == 32
    assert factor("--position-embedding-type yarn") is None
    assert factor(f"--position-embedding-type rope {scaled}") is None
    line = error_of(lambda: factor("--position-embedding-type yarn --rotary-scaling-factor 0.5"))
    assert "must be at least 1" in line


def test_unknown_arguments_and_those_that_are_not_modelled() -> None:
    read = launch(small("--log-intervall 8 --my-fork x y"))
    assert [(note.code, note.message.split(" (")[0]) for note in read.notes] == [
        ("argument-unknown", "--log-intervall 8"),
        ("argument-unknown", "--my-fork x y"),
    ]
    assert "did you mean --log-interval?" in read.notes[0].message
    assert not launch(small("--cuda-graph-impl none --cuda-graph-impl local")).notes
    assert not launch(small("--softmax-type vanilla --cuda-graph-impl none")).notes, "its default does nothing"
    off = "--softmax-type = off-by-one: is not modelled yet; vanilla and learnable are"
    assert off in error_of(lambda: launch(small("--softmax-type off-by-one")))
    assert "(--strict)" in error_of(lambda: launch(small("--my-fork 8"), strict=True))
    older = "megatron-deepspeed"
    (note,) = (one for one in launch(small("--synchronize-each-layer"), older).notes if "synchronize" in one.message)
    assert note.code == "argument-not-modelled"
    assert "may push memory either way" in note.message
    assert "(--strict)" in error_of(lambda: launch(small("--synchronize-each-layer"), older, strict=True))


def test_models_that_see_are_refused_before_anything_is_asked() -> None:
    content = f"if [ $DEBUG = true ]; then\n  {small('--model-provider llava_vlm')}\nfi\n"
    assert "--model-provider: belongs to models that see or hear" in error_of(lambda: launch(content))
    assert "give --set DEBUG=value" in error_of(lambda: launch(f"if [ $DEBUG = true ]; then\n  {small('')}\nfi\n"))


def test_scripts_that_train_nothing() -> None:
    for name in ("tools/run_text_generation_server", "examples/inference/gpt_dynamic_inference", "export"):
        wrong = small("").replace("pretrain_gpt.py", f"{name}.py")
        assert "trains nothing" in error_of(lambda wrong=wrong: launch(wrong))  # type: ignore[misc]
    assert launch(small("").replace("pretrain_gpt.py", "pretrain_generative.py"))


@pytest.mark.parametrize(
    ("given", "flags", "said"),
    [
        ("--fp8-format e4m3 --fp8-recipe mxfp8", {}, "--fp8-recipe = mxfp8: must be left out on h100"),
        ("--fp8-format hybrid", {"gpu": "a100-80gb"}, "--fp8-format = hybrid: must be left out on a100"),
        ("--expert-model-parallel-size 2", {}, "--expert-model-parallel-size = 2: must be 1"),
        ("--expert-model-parallel-size 2", {"ep": "4"}, "--ep: layout.ep = 4: must be 1"),
        (
            "--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
            {},
            "--optimizer-offload-fraction = 1.5: must be at",
        ),
        (
            "--overlap-moe-expert-parallel-comm",
            {},
            "--overlap-moe-expert-parallel-comm: must be left out without experts",
        ),
        ("--num-experts 8 --delay-wgrad-compute", {}, "must be false without --overlap-moe-expert-parallel-comm"),
    ],
)
def test_errors_name_what_the_script_says(given: str, flags: dict[str, str], said: str) -> None:
    every = {"gpu": "h100-80gb", **flags}

    def answer() -> None:
        read = launched_plan(launch(small(given), gpus=8), every)
        try:
            resolve(read.plan)
        except PlanError as error:
            raise read.located(error) from None

    assert said in error_of(answer)


def test_words_that_belong_to_no_argument_are_told_together() -> None:
    (note,) = launch(small("--clip-grad 1 2B:3 4B:5")).notes
    assert note == ("argument-loose", "2B:3 4B:5 (train.sh:2) belong to no argument")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_cache_that_is_emptied_is_read(level: int) -> None:
    read = launch(small(f"--empty-unused-memory-level {level}"))
    assert not read.notes
    assert build_plan(read.source, {}).plan.megatron.empty_cache == level


def test_variables_that_choose_a_back_end_must_agree_with_the_argument() -> None:
    chosen = "export NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0\n" + small("--attention-backend flash")
    built = plan(chosen)
    assert notes_of(built) == ()
    assert resolve(built).environment["NVTE_FUSED_ATTN"] == "0"
    contradicting = build_plan(launch("export NVTE_FUSED_ATTN=0\n" + small(""), gpus=8).source, {})
    line = "environment.NVTE_FUSED_ATTN = 0: must be 1 or left out: Megatron stops where it contradicts"
    assert line in error_of(lambda: resolve(contradicting.plan))


def test_back_ends_are_named_that_the_variables_choose() -> None:
    """``BACK_ENDS``: flash-attention alone sets the first to 1 and the second to 0."""
    flash = build_plan(launch("export NVTE_FLASH_ATTN=1 NVTE_FUSED_ATTN=0\n" + small(""), gpus=8).source, {})
    assert error_of(lambda: resolve(flash.plan)).endswith("choose the back end there (flash)")


def test_variables_of_the_machine_are_passed_over() -> None:
    exported = "export NCCL_DEBUG=INFO TORCH_NCCL_AVOID_RECORD_STREAMS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_BUFFSIZE=8"
    built = plan(f"{exported} NVTE_ALLOW_NONDETERMINISTIC_ALGO=0\n{small('')}")
    assert built.environment == {"NCCL_BUFFSIZE": "8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert notes_of(built) == ()


@pytest.mark.parametrize(
    ("directives", "srun", "gpus"),
    [
        ("#SBATCH --nodes=4 --ntasks-per-node=8", "srun -l", 32),
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=4", "srun --nodes=3 sh -c", 12),
        ("#SBATCH --ntasks=24", "srun", 24),
        ("#SBATCH --nodes=4 --ntasks-per-node=8", "srun -n 16", 16),
        ("#SBATCH --nodes=2", "srun --ntasks-per-node=8 --gpus-per-node=8", 16),
        ("#SBATCH --ntasks=16 --ntasks-per-node=8", "srun -N $SLURM_NNODES", 16),
        ("#SBATCH --ntasks=16 --ntasks-per-node=8", "torchrun --nproc_per_node=8 --nnodes=$SLURM_NNODES", 16),
        ("#SBATCH -G 16 --gpus-per-node=h100:8", "torchrun --nproc_per_node=8 --nnodes=$SLURM_JOB_NUM_NODES", 16),
        ("#SBATCH -N2 --tasks-per-node=8 --gres=gpu:a100:8,nvme:1", "srun", 16),
        (
            "#SBATCH -N 2 --ntasks-per-node=1 --gpus-per-task=8",
            "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_PER_TASK",
            16,
        ),
        ("#SBATCH --job-name=llama-N16 --nodelist=gpu-n12\n#SBATCH --gpus-per-node=8 # -N 3", "srun", 8),
    ],
)
def test_tasks_of_the_job_are_processes_of_srun(directives: str, srun: str, gpus: int) -> None:
    command = f"python pretrain_gpt.py {SMALL}"
    command = f"{srun} '{command}'" if srun.endswith("-c") else f"{srun} {command}"
    read = launch(f"#!/bin/bash\n{directives}\n{command}")
    assert build_plan(read.source, {}).plan.hardware.gpus == gpus


def test_a_kernel_that_the_scripts_backend_lacks_is_refused_with_the_flag_that_frees_it() -> None:
    read = launch(small("--attention-backend unfused"))
    problem = "must be eager with attention_backend unfused; --attention-backend auto goes with the other"
    assert problem in error_of(lambda: resolve(build_plan(read.source, {"attention": "flash"}).plan))
    built = build_plan(read.source, {"attention": "flash", "attention-backend": "auto"}).plan
    assert resolve(built).attention == "flash"


def test_torchrun_runs_a_script_that_is_no_python(tmp_path: Path) -> None:
    """``torchrun --no-python`` (``torch/distributed/run.py``: ``cmd_args``)."""
    (tmp_path / "worker.sh").write_text(f"numactl --membind=0 python pretrain_gpt.py {SMALL}")
    for started in (
        "torchrun --nproc-per-node=8 --nnodes=2 --no-python bash worker.sh",
        "torchrun --nproc-per-node=8 --nnodes=2 --no_python ./worker.sh",
    ):
        (tmp_path / "run.sh").write_text(started)
        read = reader("megatron")(str(tmp_path / "run.sh"), Asked("megatron", {}, (), {}))
        assert build_plan(read.source, {}).plan.hardware.gpus == 16


@pytest.mark.parametrize(
    ("submits", "gpu"),
    [
        ("sbatch --gres=gpu:h200:8 --nodes=4 train.slurm --seq-length 32", "h200"),
        ("sbatch --parsable \\\n  -N 4 --gpus-per-node=h200:8 train.slurm", "h200"),
        ("# sbatch --gres=gpu:h200:8 train.slurm\nsbatch -N 4 train.slurm", None),
        ("sbatch -N 4 train.slurm --gpus h200", None),
        ("sbatch -C h200 -N 4 train.slurm\nsbatch -C h100 -N 4 train.slurm", None),
        ("#SBATCH -C h100\nsbatch -C h200 -N 4 train.slurm", "h200"),
    ],
)
def test_flags_of_sbatch_name_the_gpu(tmp_path: Path, submits: str, gpu: str | None) -> None:
    (tmp_path / "train.slurm").write_text(f"srun --ntasks-per-node=8 pretrain_gpt.py {SMALL}")
    (tmp_path / "submit.sh").write_text(f"#!/bin/bash\n{submits}\n")
    asked = Asked("megatron", {}, (), {})
    place = str(tmp_path / "submit.sh")
    built = build_plan(with_gpu_of_job(reader("megatron")(place, asked), [place], asked).source, {}).plan
    assert (built.hardware.gpu, built.hardware.gpus) == (gpu, 32)


@pytest.mark.parametrize(
    ("directives", "why"),
    [
        ("#SBATCH --nodes=2-4", "--nodes=2-4 is a range, from which Slurm chooses"),
        ("set -x\n#SBATCH --nodes=4", "--nodes of line 3 stands behind a command, where sbatch reads no more"),
        ("#SBATCH --nodes=4\n#SBATCH hetjob\n#SBATCH --nodes=1", "#SBATCH hetjob cannot be followed"),
    ],
)
def test_nodes_that_a_job_leaves_open_are_asked_for(directives: str, why: str) -> None:
    command = f"#!/bin/bash\n{directives}\nsrun --ntasks-per-node=8 pretrain_gpt.py {SMALL}"
    asked = f"hardware.gpus: is needed, and {why}; give it as --set SLURM_NNODES=value or --gpus N"
    assert asked in error_of(lambda: launch(command))
    read = launch(command, variables={"SLURM_NNODES": "3"})
    assert build_plan(read.source, {}).plan.hardware.gpus == 24


def test_a_script_runs_another_by_its_path_from_the_root_of_the_project(tmp_path: Path) -> None:
    """As ``sbatch_gpt3_distributed_test.sh`` of Microsoft's Megatron-DeepSpeed does (``tests/functional_tests``)."""
    folder = tmp_path / "tests" / "gpt3"
    folder.mkdir(parents=True)
    (folder / "train.sh").write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} --num-layers $1")
    (folder / "job.sh").write_text("#SBATCH --nodes=1\nsrun sh -c 'bash tests/gpt3/train.sh 6'")
    asked = Asked("megatron", {}, vocab_size=50257)
    words = read_words(str(folder / "job.sh"), "megatron", {})
    assert build_plan(launched(words, asked).source, {}).plan.model.layers == 6


def test_a_script_of_another_model_is_told_before_its_arguments() -> None:
    """As Megatron-LM's ``examples/mimo/scripts/run_hetero_nemotron_20l_mock_train.sh`` starts it."""
    command = f"torchrun --nproc_per_node 8 -m examples.mimo.pretrain_mimo {SMALL} --encoder-dp 2 --llm-cp 1 --llm-pp 1"
    assert "starts pretrain_mimo.py, whose model is not modelled yet" in error_of(lambda: launch(command))
    other = f"torchrun --nproc_per_node 8 train_predictor.py {SMALL} --batch-size 8"
    assert "--batch-size: was renamed" in error_of(lambda: launch(other))  # "ict" is a part of another word


def test_further_trainings_of_a_line_are_told() -> None:
    loop = f"for n in 2 4; do torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} --num-layers $n; done"
    (note,) = launch(loop).notes
    assert note.code == "several-trainings"
    assert "its line starts 1 more with other values; --set n=value reads another round of its loop" in note.message
    read = launch(loop, variables={"n": "4"})
    assert (build_plan(read.source, {}).plan.model.layers, read.notes) == (4, ())


def test_conditions_that_cannot_be_decided_matter_only_where_they_reach_something() -> None:
    harmless = script('if [ -f x ]; then LOAD="--load x"; else LOAD=; fi', arguments="$LOAD")
    assert [note.code for note in launch(harmless).notes] == [
        "argument-loose",
    ]
    harmful = script('A=(--bf16)\nif [ "$MODE" = big ]; then A+=(--swiglu); fi', arguments="${A[@]}")
    assert (
        "whether --swiglu is given depends on [ $MODE = big ], which cannot be decided; give it as --set MODE=value"
        in (error_of(lambda: launch(harmful)))
    )
    assert build_plan(launch(harmful, variables={"MODE": "big"}).source, {}).plan.model.activation == "swiglu"
    assert build_plan(launch(harmful, variables={"MODE": "no"}).source, {}).plan.model.activation == "gelu"


def test_launchers() -> None:
    def gpus(command: str) -> int | None:
        return build_plan(launch(f"{command} pretrain_gpt.py {SMALL}", gpus=None).source, {}).plan.hardware.gpus

    assert gpus("torchrun --nproc_per_node=4 --nnodes 3") == 12
    assert gpus("python3 -m torch.distributed.run --nproc-per-node 2") == 2
    assert gpus("deepspeed --num_gpus 8 --num_nodes 2") == 16
    assert gpus("printf '# two\\na slots=4\\nb slots=8\\n' > hosts\ndeepspeed --hostfile hosts") == 12
    hosts = "cat > hosts <<E\na slots=4\nb slots=8\nE\ndeepspeed -H hosts"
    assert [gpus(f"{hosts} {more}") for more in ("--num_nodes 1", "--num_gpus 2", "-i a:1@b", "--exclude=a")] == [
        4,
        4,
        9,
        8,
    ]
    assert gpus("deepspeed --hostfile '' --num_gpus 8") == gpus("deepspeed -i a:0,1,2,3@b:0,1,2,3 -H none") == 8
    line = (
        "--hostfile = none: is not here, and lists the hosts that the launcher starts on: say --gpus N for all of them"
    )
    assert line in error_of(lambda: gpus("deepspeed --hostfile none --num_gpus 8"))
    assert "--include = c: names c, which the hostfile does not list" in error_of(lambda: gpus(f"{hosts} -i c"))
    assert "has an entry that DeepSpeed refuses, 'a 4'" in error_of(lambda: gpus("echo a 4 > h\ndeepspeed -H h"))
    assert gpus("srun -N 4 --ntasks-per-node=8 python -u") == 32
    assert gpus("srun -n 4 --ntasks-per-node=1 torchrun --nproc_per_node 8 --nnodes 4") == 32
    assert gpus("mpirun -np 8 -x NCCL_DEBUG=INFO python") == 8
    assert gpus("nohup env A=1 accelerate launch --num_processes 6") == 6
    assert "hardware.gpus: is needed" in error_of(lambda: gpus("python"))
    passed = build_plan(
        launch(f"mpirun -np 8 -x CUBLAS_WORKSPACE_CONFIG=:16:8 python pretrain_gpt.py {SMALL}").source, {}
    )
    assert passed.plan.environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_only_trainings_that_are_modelled() -> None:
    for name in ("pretrain_ict", "pretrain_vlm"):
        assert f"starts {name}.py, whose model is not modelled yet" in (
            error_of(lambda name=name: launch(f"torchrun --nproc_per_node 8 {name}.py {SMALL}"))  # type: ignore[misc]
        )
    assert "--img-h: belongs to models that see images" in error_of(
        lambda: launch(f"{SMALL} --img-h 336", source="arguments.txt", gpus=8)
    )
    assert launch(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} --img-h 336").notes == ()
    for pattern in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
        assert f"{pattern}: must be left out with pretrain_gpt.py, which builds GPT's layers" in error_of(
            lambda pattern=pattern: launch(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SMALL} {pattern} M*")  # type: ignore[misc]
        )
    two = f"python tools/preprocess.py --input x\n{script()}\ntorchrun --nproc_per_node 8 pretrain_gpt.py {SMALL}"
    assert [note.code for note in launch(two).notes] == ["several-trainings"]


def test_a_mapping_of_arguments_as_benchmarks_have_it() -> None:
    arguments = {
        "--num-layers": 12, "--hidden-size": 512, "--num-attention-heads": 8, "--seq-length": 1024,
        "--max-position-embeddings": 1024, "--micro-batch-size": 4, "--global-batch-size": 32, "--bf16": True,
        "--my-own": True, "--recompute-granularity": "selective", "--recompute-modules": "[mlp]",
    }  # fmt: skip
    read = plan_of_arguments(arguments, {"CUDA_DEVICE_MAX_CONNECTIONS": 1}, gpus=8, vocabulary=50257)
    assert (read.plan.model.vocab, read.plan.hardware.gpus, read.plan.recompute.modules) == (50257, 8, ("mlp",))
    assert read.plan.environment == {}
    assert next(note.code for note in read.warnings) == "argument-unknown"
    assert (
        plan_of_arguments({**arguments, "--fp16": False}, gpus=8, family="bert", vocabulary=9).plan.model.family
        == "bert"
    )


@pytest.mark.parametrize(
    ("tokenizer", "told"),
    [("", True), ("--tokenizer-type GPT2BPETokenizer", True), ("--tokenizer-type NullTokenizer", False)],
)
def test_a_vocabulary_that_no_tokenizer_uses_is_said(tokenizer: str, told: bool, tmp_path: Path) -> None:
    """50,257 would otherwise take the place of 128,256 in silence."""
    script = tmp_path / "train.sh"
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    script.write_text(
        f"torchrun pretrain_gpt.py {sizes} --micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 128256 {tokenizer}\n",
        encoding="utf-8",
    )
    read = read_given(str(script), LaunchFlags(("megatron",), (), False, None), {"gpus": "8"})
    assert read.plan.model.vocab == (50257 if told else 128256)
    unused = [note.message for note in read.warnings if note.code == "vocab-size-unused"]
    assert bool(unused) is told
    assert all("--vocab-size 128256 is not used: GPT2BPETokenizer" in message for message in unused)


def test_the_old_name_of_an_argument_is_told_where_nothing_starts() -> None:
    content = "P='--activations-checkpoint-method uniform'\n. `pwd`/SBATCH.sh\n"
    assert "train.sh:1: --activations-checkpoint-method: was renamed long ago" in error_of(lambda: launch(content))
    content = "python train.py --args $(date)/train.json\n"
    assert "$(date)/train.json, which line 1 gives it," in error_of(lambda: launch(content))


def test_of_a_batch_that_grows_in_steps_the_last_is_estimated() -> None:
    assert plan(small('--step-batch-size-schedule "0:16 250B:64"')).batch.gbs == 64
    assert plan(small('--step-batch-size-schedule "250B:1.5K,0:16"')).batch.gbs == 1500
    for wrong in ("8:x", "8:16", "0:0", "0:8,0:16", "0.0.0:8"):
        with pytest.raises(PlanError, match="must be steps such as"):
            launch(small(f"--step-batch-size-schedule {wrong}"))


def test_a_batch_that_grows_in_steps_is_kept_beside_flags(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(small('--step-batch-size-schedule "0:16 250B:64"'), encoding="utf-8")
    flags = LaunchFlags(("megatron",), (), False, None)
    assert read_given(str(tmp_path / "train.sh"), flags, {"gpus": "8"}).plan.batch.gbs == 64
    with pytest.raises(PlanError, match=r"train.sh:\d+: --global-batch-size = 8: must be left out"):
        launch(small('--global-batch-size 8 --step-batch-size-schedule "0:16"'))


def test_arguments_of_a_checkpoint_are_said_not_to_be_read() -> None:
    """``load_args_from_checkpoint``: some of the checkpoint's replace those of the script."""
    (note,) = launch(small("--use-checkpoint-args --load ckpt")).notes
    assert (note.code, "is not read" in note.message) == ("checkpoint-args", True)


def test_the_fuser_of_operations_with_experts_is_told() -> None:
    (note,) = launch(small("--num-experts 4 --moe-grouped-gemm --use-transformer-engine-op-fuser")).notes
    assert note.code == "argument-not-modelled"
    assert "not modelled yet with experts" in note.message


CHAIN = "--num-experts 4 --moe-grouped-gemm --swiglu --disable-bias-linear --fp8-format e4m3 --fp8-recipe mxfp8"
CHAIN += " --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag --overlap-param-gather --overlap-grad-reduce"
CHAIN += " --use-distributed-optimizer --moe-shared-expert-intermediate-size 128"


@pytest.mark.parametrize("shared", [False, True])
def test_experts_are_a_chain_of_operations(shared: bool) -> None:
    """Where Transformer Engine has one of Blackwell's kernels for it; else shared experts stop, and others are told."""
    which, columns = ("--use-grouped-gemm-for-shared-expert", "shared-expert") if shared else (
        "--use-transformer-engine-op-fuser", "mlp",
    )  # fmt: skip
    turns = f" --moe-{columns}-glu-interleave-size"
    given = f"{CHAIN} {which}"
    environment = "export NVTE_CUTEDSL_FUSED_GROUPED_MLP=1\n"
    read = build_plan(launch(environment + small(f"{given}{turns} 32")).source, {}).plan
    assert (read.experts.shared_chain, read.megatron.fuses_operations) == (shared, not shared)
    if shared:
        assert "must be 32" in error_of(lambda: launch(environment + small(given)))
        assert not launch(small(which)).notes, "no shared experts"
        spoken = launch(small(f"{given}{turns} 32")).spoken
        assert spoken is not None
        assert [one.name for one in spoken.written["experts.shared_chain"]] == [which]
    else:
        for other in (small(f"{given}{turns} 32"), environment + small(f"{given}{turns} 16")):
            assert "argument-not-modelled" in [note.code for note in launch(other).notes]


def test_channels_of_groups_are_read_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "nccl.yaml"
    file.write_text("tp:\n  max_ctas: 8\ndp_cp:\n  min_ctas: 2\n  max_ctas: 16\nmp:\n  cga_cluster_size: 2\n")
    assert plan(small(f"--nccl-communicator-config-path {file}")).megatron.nccl_blocks == "tp=-8,dp_cp=2-16"
    missing = launch(small("--nccl-communicator-config-path nowhere.yaml"))
    assert [note.code for note in missing.notes] == ["nccl-configuration-missing"]
    file.write_text("tp:\n  max_ctas: 8M\n")
    line = error_of(lambda: plan(small(f"--nccl-communicator-config-path {file}")))
    assert line.endswith("must be a whole number of channels from 1 to 999")
    file.write_text("tp:\n  net_name: socket\n")
    assert "NCCL_NET=Socket" in error_of(lambda: plan(small(f"--nccl-communicator-config-path {file}")))
