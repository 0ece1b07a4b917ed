"""Words of a command line: flags with several values, and all that is wrong at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.cli import main
from memplan.commands.words import expanded, spelled, with_file_of_csv
from memplan.plan.errors import PlanError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a --compare b c", "a --compare b --compare c"),
        ("--compare b c --json", "--compare b --compare c --json"),
        ("--compare b - --tp 3", "--compare b --compare - --tp 3"),
        ("--vary tp=1,2 pp=1,2 plan", "--vary tp=1,2 --vary pp=1,2 plan"),
        ("--vary tp=1,2 --compare a b", "--vary tp=1,2 --compare a --compare b"),
        ("--compare a --vary tp=1 --compare b", "--compare a --vary tp=1 --compare b"),
        ("a -- --compare b c", "a -- --compare b c"),
        ("--compare=a b", "--compare=a b"),
        ("--tp 1 --compare", "--tp 1 --compare"),
        ("", ""),
    ],
)
def test_each_value_gets_its_flag(written: str, meant: str) -> None:
    assert expanded(written.split()) == meant.split()


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--csv", "--csv=-"),
        ("--csv - --tp 2", "--csv=- --tp 2"),
        ("--csv out.csv plan.yaml", "--csv=out.csv plan.yaml"),
        ("--csv plan.yaml", "--csv=- plan.yaml"),
        ("--csv --json", "--csv=- --json"),
        ("--csv=out plan", "--csv=out plan"),
        ("a -- --csv x.csv", "a -- --csv x.csv"),
        ("--csv -- x.csv", "--csv=- -- x.csv"),
    ],
)
def test_csv_has_a_file_or_none(written: str, meant: str) -> None:
    assert with_file_of_csv(written.split()) == meant.split()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which ``memplan`` refuses ``words``."""
    assert main(list(words)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


def test_all_unknown_flags_and_missing_values_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(
        capsys, "estimate", "--modl", "gpt2", "--batch-size", "4", "--grad-acum=2", "--zzz", "--gpus", "--mbs"
    )
    assert line.startswith("6 errors: (1) --modl: is not a flag of memplan estimate; did you mean --model? ")
    assert "--batch-size: is not a flag of memplan estimate; did you mean --mbs?" in line
    assert "--grad-acum: is not a flag of memplan estimate; did you mean --accumulation?" in line
    assert "--zzz: is not a flag of memplan estimate; --help-all lists them" in line
    assert "(5) --gpus: needs a value: number of GPUs" in line
    assert "(6) --mbs: needs a value: " in line


@pytest.mark.parametrize(
    ("flag", "guess"),
    [
        ("--fsdp", "--framework fsdp"),
        ("--deepspeed", "--framework deepspeed, or its ds_config.json beside PLAN"),
        ("--oom", "memplan explain 'MESSAGE'"),
        ("--gradient-checkpoint", "--recompute full"),
        ("--tpp", "--tp"),
    ],
)
def test_what_is_meant_by_a_flag_that_there_is_not(flag: str, guess: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        refused(capsys, "estimate", flag, "x") == f"{flag}: is not a flag of memplan estimate; did you mean {guess}?\n"
    )


def test_all_wrong_values_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimate", "--model", "llama-3-8bb", "--dtype=fp33", "--gpu=a100", "--optimizer=adamx")
    assert line.startswith("4 errors: (1) --model: model = llama-3-8bb: ")
    for part in ("--dtype: precision.dtype = fp33: ", "--gpu: hardware.gpu = a100: could be ", "did you mean adam?"):
        assert part in line


def test_a_search_asks_for_all_that_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "suggest-partition")
    assert line.startswith("3 errors: (1) command line: model: is missing")
    assert "(2) hardware.gpu: is missing" in line
    assert "(3) batch.gbs: is missing" in line
    assert refused(capsys, "suggest-partition", "--model=gpt2", "--gbs=8").startswith("hardware.gpu: is missing")


@pytest.mark.parametrize("named", ["8xh100", "8 x H100", "h100x8", "8*nvidia h100"])
def test_a_number_of_gpus_with_their_name(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model=gpt2", "--framework=ddp", "--gpu", named, "-q"]) == 0
    counted = capsys.readouterr().out
    assert main(["estimate", "--model=gpt2", "--framework=ddp", "--gpu=h100", "--gpus=8", "-q"]) == 0
    assert capsys.readouterr().out == counted
    assert main(["estimate", "--model=gpt2", "--framework=ddp", "--gpu=4x4090", "-q"]) == 0
    assert "on rtx-4090" in capsys.readouterr().out
    assert "is not the 8 of --gpu" in refused(capsys, "estimate", "--model=gpt2", "--gpu", named, "--gpus=4")


def test_a_gpu_is_suggested_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimate", "--model=gpt2", "--gpu=3050")
    assert "did you mean" not in line
    assert "for another GPU, give its memory: --capacity 24GiB" in line
    assert "did you mean rtx-3090?" in refused(capsys, "estimate", "--model=gpt2", "--gpu=rtx3090s")


def test_what_shards_as_zero_beside_other_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimate", "--model=llama-3-8b", "--tp=4", "--zero=3")
    assert (
        "fsdp shards as ZeRO-3 does where --zero is left out (with --fsdp-code torchtitan beside tp or pp, and" in line
    )
    assert "deepspeed has" not in line
    assert "takes it with --framework" not in line
    line = refused(capsys, "estimate", "--model=llama-3-8b", "--framework=megatron", "--cp=2", "--zero=3")
    assert "and with --fsdp-newest beside cp alone)" in line
    assert "no framework has ZeRO-2 beside cp" in refused(
        capsys, "estimate", "--model=llama-3-8b", "--framework=megatron", "--cp=2", "--zero=2"
    )


def test_a_script_asks_for_all_of_its_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.sh"
    script.write_text(
        "source ./conf.sh\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers $L --hidden-size $H "
        "--num-attention-heads 12 --seq-length 64 --micro-batch-size 1 --lr $LR --vocab-size 50257\n"
    )
    line = refused(capsys, "estimate", str(script))
    assert "--num-layers: is needed, and $L is not set in the script; give it as --set L=value" in line
    assert "--hidden-size: is needed, and $H is not set in the script" in line
    assert "./conf.sh (line 1) is sourced, and not found below the script's folder" in line
    assert "$LR" not in line


@pytest.mark.parametrize(
    ("words", "read"),
    [
        (["--autocast", "--mbs", "4", "--autocast", "false"], ["--mbs", "4", "--no-autocast"]),
        (["--no-autocast", "--autocast=True"], ["--autocast"]),
        (["--autocast", "--no-autocast"], ["--autocast", "--no-autocast"]),
    ],
)
def test_a_switch_with_a_value_stands_over_the_one_before(words: list[str], read: list[str]) -> None:
    """As ``--mbs 4 --mbs 2`` does, so that a way out can be pasted behind the command that it is for."""
    assert spelled(words, ()) == (read, [])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--orpo --cpo", "--cpo: contradicts --orpo, which sets the same field"),
        ("--orpo --trainer cpo", "--trainer: cpo contradicts --orpo, which sets the same field"),
        ("--trainer cpo --orpo", "--orpo: contradicts --trainer cpo, which sets the same field"),
    ],
)
def test_words_of_one_field_that_differ(words: str, line: str) -> None:
    """A word that is a whole setting (``--orpo`` is ``--trainer orpo``) is compared by what it says."""
    with pytest.raises(PlanError) as caught:
        spelled(words.split(), ())
    assert str(caught.value) == line
    assert spelled(["--orpo", "--trainer", "orpo"], ()) == (["--trainer=orpo", "--trainer", "orpo"], [])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--autocast bf16", "--autocast: is a switch, which takes no value: --autocast --dtype bf16"),
        ("--autocast=fp16", "--autocast: is a switch, which takes no value: --autocast --dtype fp16"),
        (
            "--padding longest",
            "--padding: longest is a value, which a switch does not take: --padding turns it on, --no-padding off",
        ),
        (
            "--no-padding=longest",
            "--no-padding: longest is a value, which a switch does not take: --padding turns it on, --no-padding off",
        ),
        ("--flash-attn 2", "did you mean --attention flash_attention_2?"),
        ("--gradient_checkpointing false", "did you mean --recompute none?"),
        ("--gradient-checkpointing=False", "did you mean --recompute none?"),
        ("--gradient-checkpointing true", "did you mean --recompute full?"),
        ("--fsdp shard_grad_op", "did you mean --framework fsdp --no-reshard-after-forward?"),
        ("--fsdp full_shard", "did you mean --framework fsdp?"),
        ("--deepspeed zero3", "did you mean --framework deepspeed --zero 3?"),
        ("--mixed_precision bf16", "in single and ddp fp32 parameters with compute in 16 bits are --autocast --dtype"),
        ("--zero zero3_offload", "is more than a stage: --zero 3 --offload-optimizer cpu --offload-param cpu"),
        ("--zero 2-offload", "is more than a stage: --zero 2 --offload-optimizer cpu"),
    ],
)
def test_values_that_other_tools_write_behind_it(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is refused says what to type."""
    assert line in refused(capsys, "estimate", "--model=gpt2", *words.split())


@pytest.mark.parametrize("words", ["--autocast --dtype bf16", "--framework fsdp --no-reshard-after-forward --gpus 2"])
def test_what_was_told_is_read(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model=gpt2", "-q", "--gpu=h100", *words.split()]) == 0
    assert "Fits" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["1", "yes", "on", "True"])
def test_switches_are_turned_on_and_off_by_any_truth(value: str) -> None:
    assert spelled(["--autocast", value], ()) == (["--autocast"], [])
    off = {"1": "0", "yes": "no", "on": "off", "True": "False"}[value]
    assert spelled([f"--autocast={off}"], ()) == (["--no-autocast"], [])


def test_a_switch_is_before_a_plan_or_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What stands behind it may be PLAN."""
    plan = tmp_path / "plan"
    plan.write_text("model: gpt2\n")
    for behind in (str(plan), "llama-3-8b", "llama-3-8b h100"):
        assert main(["estimate", "-q", "--no-records", *f"--autocast {behind} --framework=single".split()]) in (0, 1)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--gpu A100 80GB", "plan = 80GB: is neither a file nor a built-in example; names with spaces need quotes"),
        ("--gpu H100 SXM", "plan = SXM: is neither a file nor a built-in example; names with spaces need quotes"),
        ("8xh100", "plan = 8xh100: is neither a file nor a built-in example; a GPU is --gpu 8xh100"),
    ],
)
def test_a_part_of_a_gpu_is_no_plan(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, "estimate", "--model=gpt2", *words.split())
