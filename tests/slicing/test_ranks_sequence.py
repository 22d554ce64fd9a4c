"""Sequence parallelism on real ranks: the numbers of one process, and the paper's exchanges."""

import pytest
from support.ranks import run_ranks
from support.sliced_models import (
    differences,
    encoder_case,
    fingerprints,
    gpt_case,
    slice_group,
    vit_case,
)

CASES = {
    "gpt": lambda: gpt_case(tied=False),
    "tied": lambda: gpt_case(tied=True, length=7),
    "short": lambda: gpt_case(tied=False, length=2),
    "vit": vit_case,
    "encoder": lambda: encoder_case(batch_first=True),
    "sequence first": lambda: encoder_case(batch_first=False, norm_first=True),
}


def of_cases(context, names, modes):
    found = {}
    for name in names:
        for mode in modes:
            for sequence_dim in (0 if name == "sequence first" else 1, None):
                group = slice_group(context, sequence_dim=sequence_dim)
                case = CASES[name]()
                key = (name, mode, sequence_dim)
                prints = fingerprints(case, group, mode)
                found[key] = differences(case, group, mode), prints, dict(group.gathers)
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stretches_of_the_sequence_have_the_gradients_of_one_process(ranks):
    found = run_ranks(of_cases, ranks, [*CASES], ["", "full"], tp=ranks)
    for key, (_, wanted, _) in found[0].items():
        for rank in range(ranks):
            distance, prints, gathers = found[rank][key]
            assert max(distance.values()) < 1e-12, (key, rank, distance)
            assert prints == wanted, (key, rank)
            assert set(gathers) <= ({"__getitem__"} if key[0] == "vit" else set()), (key, gathers)
