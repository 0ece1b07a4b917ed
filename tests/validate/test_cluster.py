"""Places that torchrun and srun give to processes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from memplan.plan.errors import PlanError
from memplan.validate.cluster import PORTS, Membership, first_host, hosts_of, membership, port_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
}
BATCH = {
    "SLURM_JOB_ID": "200505",
    "SLURM_NTASKS": "16",
    "SLURM_NODELIST": "gnode[10,20,25,37]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
"""A batch script's: https://gist.github.com/jerinphilip/212b3814264c3b8da512afc2cfda4bcb"""
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gnode[10,20]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


def test_torchrun() -> None:
    assert membership(TORCHRUN, 16) == Membership("torchrun", 5, 16, 1, "gpu01", 29500)


def test_srun() -> None:
    found = membership(SRUN, 16)
    assert found == Membership("srun", 9, 16, 1, "gnode10", port_of(SRUN))
    assert found.variables == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gnode10",
        "MASTER_PORT": str(port_of(SRUN)),
    }


def test_address_that_the_script_chose() -> None:
    found = membership({**SRUN, "MASTER_ADDR": "head-ib0", "MASTER_PORT": "1234"}, 16)
    assert found is not None
    assert (found.address, found.port) == ("head-ib0", 1234)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"RANK": "0"},
    ],
    ids=["nothing", "batch script", "shell of srun --pty", "rank alone"],
)
def test_not_a_rank(environment: dict[str, str]) -> None:
    assert membership(environment, 16) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {**TORCHRUN, "WORLD_SIZE": "8"},
            "environment: WORLD_SIZE = 8: must be 16, the GPUs of the run: torch",
        ),
        (
            {**SRUN, "SLURM_STEP_NUM_TASKS": "8"},
            "environment: SLURM_STEP_NUM_TASKS = 8: must be 16, the GPUs of the run",
        ),
        ({**TORCHRUN, "RANK": "16"}, "environment: RANK = 16: must be below WORLD_SIZE = 16"),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, "environment: LOCAL_RANK = one: must be a whole number"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "environment: MASTER_PORT: must be set"),
        ({**SRUN, "SLURM_STEP_NODELIST": "gpu[1-"}, r"environment: SLURM_STEP_NODELIST = gpu\[1-: must be host names"),
    ],
)
def test_contradictions(environment: dict[str, str], said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        membership(environment, 16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("x1", ["x1"]),
        ("gpu[03-05,12],x1", ["gpu03", "gpu04", "gpu05", "gpu12", "x1"]),
        ("gpu[9-11]", ["gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[01,03]-ib", ["r1n01-ib", "r1n03-ib", "r2n01-ib", "r2n03-ib"]),
        ("a,b-1,c.d.org", ["a", "b-1", "c.d.org"]),
        ("n[7]", ["n7"]),
    ],
)
def test_hosts(nodes: str, hosts: list[str]) -> None:
    assert list(hosts_of(nodes)) == hosts
    assert first_host(nodes) == hosts[0]


@pytest.mark.parametrize("nodes", ["", "gpu[", "gpu]", "gpu[a-b]", "gpu[5-3]", "gpu[]", "a,,b", ",a", "gpu[1[2]]"])
def test_lists_that_cannot_be_read(nodes: str) -> None:
    with pytest.raises(PlanError, match="SLURM_STEP_NODELIST"):
        hosts_of(nodes)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True), st.integers(1, 4))
def test_what_brackets_hold_is_what_they_stand_for(numbers: list[int], width: int) -> None:
    names = [str(number).zfill(width) for number in numbers]
    assert list(hosts_of(f"n[{','.join(names)}]")) == [f"n{name}" for name in names]


@given(st.integers(0, 10**9), st.integers(0, 6))
def test_ports(job: int, step: int) -> None:
    """The same for all ranks of a step; another one for the job's next step, and for the next job."""

    def port(job: int, step: int) -> int:
        return port_of({"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})

    assert port(job, step) in PORTS
    assert len({port(job, step), port(job, step + 1), port(job + 2, step)}) == 3


def test_step_whose_number_is_a_word() -> None:
    assert port_of({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "interactive"}) in PORTS


@pytest.mark.parametrize(("shown", "local"), [("0", 0), ("GPU-8932f937", 0), ("0,1,2,3", 1)])
def test_a_task_that_sees_one_gpu_has_that(shown: str, local: int) -> None:
    """``srun --gpus-per-task 1`` numbers what each task sees from 0."""
    found = membership({**SRUN, "CUDA_VISIBLE_DEVICES": shown}, 16)
    assert found is not None
    assert found.local_rank == local
