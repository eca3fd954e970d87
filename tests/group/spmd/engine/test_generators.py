"""``torch.Generator(device="spmd")``: random numbers from a generator of one's own."""

from __future__ import annotations

import pytest
import torch

import spmd
from tests.group.spmd.driven import driven

pytestmark = pytest.mark.processes


def made(seed: int = 3, device: str = "spmd") -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


@driven
def test_numbers_are_those_of_a_cpu_generator_with_the_seed() -> None:
    ours, theirs, device = made(), made(device="cpu"), spmd.device()
    for _ in range(2):
        drawn = (
            torch.randn(5, generator=ours, device=device),
            torch.randperm(7, generator=ours, device=device),
            torch.empty(4, device=device).uniform_(generator=ours),
            torch.bernoulli(torch.full((6,), 0.5, device=device), generator=ours),
        )
        expected = (
            torch.randn(5, generator=theirs),
            torch.randperm(7, generator=theirs),
            torch.empty(4).uniform_(generator=theirs),
            torch.bernoulli(torch.full((6,), 0.5), generator=theirs),
        )
        for one, other in zip(drawn, expected, strict=True):
            assert torch.equal(one.cpu(), other)


@driven
def test_other_numbers_stay_what_they_are() -> None:
    device = spmd.device()
    torch.manual_seed(5)
    expected = [torch.randn(3, device=device).tolist() for _ in range(2)]
    torch.manual_seed(5)
    first = torch.randn(3, device=device).tolist()
    torch.randn(8, generator=made(), device=device)
    assert [first, torch.randn(3, device=device).tolist()] == expected


@driven
def test_a_state_can_be_kept() -> None:
    generator, device = made(), spmd.device()
    assert isinstance(generator, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert generator.device == device
    torch.randn(3, generator=generator, device=device)
    state, other = generator.get_state(), generator.clone_state()
    expected = torch.randn(3, generator=generator, device=device).tolist()
    assert torch.randn(3, generator=other, device=device).tolist() == expected
    generator.set_state(state)
    assert torch.randn(3, generator=generator, device=device).tolist() == expected


@driven
def test_a_generator_of_the_cpu_is_refused() -> None:
    with pytest.raises(
        NotImplementedError, match=r"got one of cpu: make it with torch.Generator\(device='spmd'\)"
    ):
        torch.randn(3, generator=made(device="cpu"), device=spmd.device())
