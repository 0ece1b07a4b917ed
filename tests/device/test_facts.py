"""Workspaces and contexts (``memplan/device/facts.py``): formulas by hand, and how environment
variables are read."""

from __future__ import annotations

from itertools import product

import pytest

from memplan.device import measured
from memplan.device.facts import Fact, contexts_of, cublas_workspaces, cuda_context
from memplan.device.gpus import GPUS
from memplan.plan.read import read_plan
from memplan.plan.resolve import resolve
from tests.oracle.caching_allocator import block_size

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
VOLTA, AMPERE, ADA, HOPPER, BLACKWELL = (7, 0), (8, 0), (8, 9), (9, 0), (10, 0)
RELEASES = [(2, minor) for minor in range(16)]


def sizes(*arguments: object) -> dict[str, int]:
    return {fact.name: fact.bytes for fact in cublas_workspaces(*arguments)}  # type: ignore[arg-type]


def test_default_workspace_is_two_of_4096_and_eight_of_16_kib() -> None:
    """2 x 4096 KiB + 8 x 16 KiB = 8320 KiB: the 8519680 B of pytorch/pytorch issue 95668."""
    assert sizes(AMPERE) == {"cublas_workspace": 8_519_680}
    assert block_size(8_519_680) == 8_519_680, "a multiple of 512, split off a 20 MiB segment"


@pytest.mark.parametrize(
    ("capability", "torch_version", "expected"),
    [
        (HOPPER, (2, 0), 32 * MIB),
        (HOPPER, (2, 13), 32 * MIB),
        (BLACKWELL, (2, 11), 8_519_680),
        (BLACKWELL, (2, 12), 32 * MIB),
        ((12, 0), (2, 12), 32 * MIB),
        ((11, 0), (2, 13), 8_519_680),
        ((11, 0), (2, 14), 32 * MIB),
        (ADA, (2, 15), 8_519_680),
    ],
)
def test_large_workspace_by_architecture_and_release(
    capability: tuple[int, int], torch_version: tuple[int, int], expected: int
) -> None:
    assert sizes(capability, {}, torch_version)["cublas_workspace"] == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (":4096:8", 32 * MIB),
        (":16:8", 128 * KIB),
        (":4096:2:16:8", 8_519_680),
        (":0:0", 0),
        ("trailing :64:1 text", 64 * KIB),
        ("", 8_519_680),
    ],
)
def test_workspace_config_adds_its_pairs(value: str, expected: int) -> None:
    assert sizes(VOLTA, {"CUBLAS_WORKSPACE_CONFIG": value}) == {"cublas_workspace": expected}


def test_workspace_config_overrides_the_large_default_too() -> None:
    assert sizes(HOPPER, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == {"cublas_workspace": 128 * KIB}


def test_before_torch_2_cublas_took_its_own() -> None:
    assert cublas_workspaces(HOPPER, {}, (1, 13)) == ()


def test_cublaslt_shares_from_release_2_12_on() -> None:
    apart = {release: len(cublas_workspaces(AMPERE, {}, release)) for release in RELEASES}
    assert [release for release, count in apart.items() if count == 1] == [(2, 12), (2, 13), (2, 14)]


def test_cublaslt_comes_and_goes_before_2_9_and_both_from_2_15_on() -> None:
    held = {release: [fact.held for fact in cublas_workspaces(AMPERE, {}, release)] for release in RELEASES}
    assert held[2, 8] == [True, False]
    assert held[2, 9] == [True, True]
    assert held[2, 14] == [True]
    assert held[2, 15] == [False, False]
    assert [fact.held for fact in cublas_workspaces(AMPERE, {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}, (2, 15))] == [True]


@pytest.mark.parametrize("torch_version", [(2, 8), (2, 11), (2, 12), (2, 14)])
def test_unified_workspace_switch(torch_version: tuple[int, int]) -> None:
    key = "TORCH_CUBLASLT_UNIFIED_WORKSPACE"
    assert sizes(AMPERE, {key: "1"}, torch_version) == {"cublas_workspace": 8_519_680}
    assert sizes(AMPERE, {key: "0"}, torch_version) == {"cublas_workspace": 8_519_680, "cublaslt_workspace": MIB}


@pytest.mark.parametrize(
    ("value", "expected"), [("2048", 2 * MIB), ("0", 0), (" +512", 512 * KIB), ("64k", 64 * KIB), ("", MIB)]
)
def test_cublaslt_size_is_read_by_stoi(value: str, expected: int) -> None:
    assert sizes(AMPERE, {"CUBLASLT_WORKSPACE_SIZE": value}, (2, 8))["cublaslt_workspace"] == expected


def test_cublaslt_is_at_most_cublas_in_2_9_to_2_11() -> None:
    environment = {"CUBLASLT_WORKSPACE_SIZE": "16384"}
    assert sizes(AMPERE, environment, (2, 10))["cublaslt_workspace"] == 8_519_680
    assert sizes(AMPERE, environment, (2, 8))["cublaslt_workspace"] == 16 * MIB


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", "4096:8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096"),
        ("CUBLAS_WORKSPACE_CONFIG", ":-1:8"),
        ("CUBLASLT_WORKSPACE_SIZE", "big"),
        ("CUBLASLT_WORKSPACE_SIZE", "-1"),
        ("CUBLASLT_WORKSPACE_SIZE", "2147483648"),
        ("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "yes"),
    ],
)
def test_malformed_cublas_variables_are_refused(key: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^{key}={value} is not read by PyTorch; allowed [^\n]+$"):
        cublas_workspaces(AMPERE, {key: value}, (2, 8))


@pytest.mark.parametrize("value", [":99999999999:99999999", ":1048576:1024:1:1", f":{'9' * 5000}:1"])
def test_workspaces_that_no_gpu_has_are_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"^CUBLAS_WORKSPACE_CONFIG asks for workspaces of more than 1 TiB"):
        cublas_workspaces(AMPERE, {"CUBLAS_WORKSPACE_CONFIG": value})


def test_malformed_cache_switch_is_refused_where_it_exists() -> None:
    environment = {"TORCH_CUBLAS_WORKSPACE_CACHE": "true"}
    assert len(cublas_workspaces(AMPERE, environment, (2, 13))) == 1
    with pytest.raises(ValueError, match="allowed are 0 and 1"):
        cublas_workspaces(AMPERE, environment, (2, 15))


def context(gpu: str, *arguments: object) -> Fact:
    fact = cuda_context(gpu, *arguments)  # type: ignore[arg-type]
    assert fact is not None
    return fact


def test_old_torch_loads_every_kernel() -> None:
    assert context("v100-32gb", {}, (1, 10)).bytes == 1271 * MIB
    assert context("a100-40gb", {}, (1, 10)).bytes == 1573 * MIB
    assert max(fact.bytes for fact in contexts_of("a100-80gb", {}, (1, 10))) == pytest.approx(1.78 * GIB, rel=1e-6)


def test_lazy_loading_about_halves_the_context() -> None:
    lazy = context("a100-80gb")
    eager = context("a100-80gb", {"CUDA_MODULE_LOADING": "EAGER"})
    assert lazy.bytes == pytest.approx(0.47 * GIB, rel=1e-6)
    assert eager.bytes == pytest.approx(0.92 * GIB, rel=1e-6)
    assert context("a100-80gb", {"CUDA_MODULE_LOADING": "LAZY"}) == lazy


def test_newest_measurement_that_is_not_newer_than_torch() -> None:
    eager = {"CUDA_MODULE_LOADING": "EAGER"}
    by_release = [context("a100-80gb", eager, release).bytes for release in [(1, 8), (1, 12), (1, 13), (2, 0), (2, 1)]]
    assert by_release == [by_release[0]] * 2 + [by_release[2]] * 2 + [by_release[4]]
    assert len(set(by_release)) == 3


@pytest.mark.parametrize("gpu", ["mi300x", "rtx-4090", "gb200", "v100-32gb", "no-such-gpu"])
def test_an_unmeasured_context_is_none(gpu: str) -> None:
    assert cuda_context(gpu) is None


def test_an_eager_context_is_not_guessed_from_a_bare_one() -> None:
    assert cuda_context("h200", {"CUDA_MODULE_LOADING": "EAGER"}) is None


def test_contexts_have_sources() -> None:
    for gpu, release in product(GPUS, [(1, 10), (2, 13)]):
        fact = cuda_context(gpu, {}, release)
        if fact is not None:
            assert fact.name == "cuda_context"
            assert fact.source.startswith("https://")
            assert fact.note
            assert 250 * MIB < fact.bytes < 2 * GIB


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ({"model": "gpt2"}, 1),
        ({"model": "gpt2", "recompute": "full"}, 2),
        ({"model": "llama-3-8b"}, 0),
        ({"model": "gpt2", "torch": "2.13"}, 0),
        ({"model": "gpt2", "framework": "deepspeed", "zero": "3", "gpus": "2"}, 0),
        ({"model": "gpt2", "framework": "deepspeed", "zero": "2", "gpus": "2"}, 1),
    ],
)
def test_cublaslt_works_apart_where_a_bias_is_fused(flags: dict[str, str], more: int) -> None:
    """torch 2.11 on an H200 held 65 MiB in GPT-2, BERT, OPT, GPT-J and GPT-NeoX, 66 with recompute, 64 in Llama."""
    plan = resolve(read_plan(None, {"gpu": "h200", "torch": "2.11", **flags}).plan)
    assert sum(hold.bytes for hold in measured.cublas_workspaces(plan)) == (64 + more) * MIB
