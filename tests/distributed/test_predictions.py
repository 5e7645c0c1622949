"""Predicted memory against what simulated devices count: stages, ranks, precisions, accumulation, checkpointing, tiers, models."""

import pytest

from shardwise.testing import World
from tests.distributed.predicted import CASES, Outcome, measure

pytestmark = pytest.mark.dist
MEAN_ERROR, WORST_ERROR = 0.03, 0.08

Found = list[tuple[int, int, str, Outcome]]
"""Ranks, rank, case, outcome."""


@pytest.fixture(scope="module")
def found(sim_world: World, tmp_path_factory: pytest.TempPathFactory) -> Found:
    rows: Found = []
    for num_ranks, cases in CASES.items():
        folder = str(tmp_path_factory.mktemp("offload"))
        outcomes = sim_world.run(measure, cases, folder, ranks=num_ranks, timeout_seconds=240)
        for rank, of_rank in enumerate(outcomes):
            rows += [(num_ranks, rank, case.name, outcome) for case, outcome in zip(cases, of_rank, strict=True)]
    return rows


def _table(found: Found) -> str:
    lines = [f"{'ranks':>5} {'rank':>4} {'measured':>10} {'predicted':>10} {'error':>8}  case, peak"]
    for num_ranks, rank, name, outcome in sorted(found, key=lambda row: -abs(row[3].error)):
        figures = f"{outcome.measured_bytes:>10} {outcome.predicted_bytes:>10} {outcome.error:>8.3%}"
        lines.append(f"{num_ranks:>5} {rank:>4} {figures}  {name}; {outcome.moment}")
    return "\n".join(lines)


def test_predicted_peaks_are_those_that_devices_count(found: Found) -> None:
    assert len({(num_ranks, name) for num_ranks, _, name, _ in found}) >= 40
    errors = [abs(outcome.error) for *_, outcome in found]
    assert sum(errors) / len(errors) <= MEAN_ERROR, _table(found)
    assert max(errors) <= WORST_ERROR, _table(found)


def test_what_is_said_to_fit_does(found: Found) -> None:
    over = [row for row in found if row[3].measured_bytes > row[3].predicted_bytes + row[3].late_bytes]
    assert not over, _table(over)


def test_the_host_holds_what_was_predicted(found: Found) -> None:
    """By the ledger of the engine; what is read and written through may be less than what is allowed for it."""
    away = [(name, kind, *both) for *_, name, outcome in found for kind, both in outcome.host.items() if kind != "STAGING"]
    assert {kind for _, kind, _, _ in away} >= {"OPTIM", "MASTER", "GRAD", "ACTIVATION"}
    wrong = [row for row in away if row[1] in ("OPTIM", "MASTER", "GRAD") and abs(row[3] / max(1, row[2]) - 1) > MEAN_ERROR]
    assert not wrong, "\n".join(map(str, wrong))
