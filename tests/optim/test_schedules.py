"""Schedules against those of torch, step by step; and that they are functions of the step."""

import pytest

from hpcpar.optim import schedules

pytestmark = pytest.mark.serial


def torch_rates(make, steps=25, lr=0.3):
    torch = pytest.importorskip("torch", reason="torch is the oracle")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    schedule = make(torch.optim.lr_scheduler, optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


CASES = {
    "step": (schedules.step(0.3, 7, 0.5), lambda s, o: s.StepLR(o, 7, 0.5)),
    "milestones": (schedules.step(0.3, [3, 10], 0.2), lambda s, o: s.MultiStepLR(o, [3, 10], 0.2)),
    "cosine": (schedules.cosine(0.3, 24, 0.01), lambda s, o: s.CosineAnnealingLR(o, 24, 0.01)),
    "polynomial": (schedules.polynomial(0.3, 20, 2.0), lambda s, o: s.PolynomialLR(o, 20, 2.0)),
    "exponential": (schedules.exponential(0.3, 0.9), lambda s, o: s.ExponentialLR(o, 0.9)),
    "warm-up, then constant": (
        schedules.warm_up(schedules.constant(0.3), 5, 0.1),
        lambda s, o: s.LinearLR(o, 0.1, 1.0, 5),
    ),
    "warm-up, then cosine": (
        schedules.warm_up(schedules.cosine(0.3, 19), 6, 0.25),
        lambda s, o: s.SequentialLR(o, [s.LinearLR(o, 0.25, 1.0, 6), s.CosineAnnealingLR(o, 19)], [6]),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_rates_equal_those_of_torch(name):
    schedule, make = CASES[name]
    assert [schedule(step) for step in range(25)] == pytest.approx(torch_rates(make), abs=1e-14)


def test_schedules_end_where_they_should_and_stay():
    assert schedules.cosine(1.0, 10, 0.1)(10) == schedules.cosine(1.0, 10, 0.1)(1000) == pytest.approx(0.1)
    assert schedules.polynomial(1.0, 10, 3.0, 0.2)(99) == pytest.approx(0.2)
    assert schedules.warm_up(schedules.constant(1.0), 4)(0) == 0
    assert schedules.warm_up(schedules.constant(1.0), 0)(0) == 1


def test_a_schedule_has_no_memory():
    schedule = schedules.warm_up(schedules.cosine(0.3, 19), 6)
    forward = [schedule(step) for step in range(30)]
    backward = [schedule(step) for step in reversed(range(30))]
    assert forward == backward[::-1]


def test_wrong_lengths_are_named():
    with pytest.raises(ValueError, match="cosine: the total"):
        schedules.cosine(1.0, 0)
    with pytest.raises(ValueError, match="polynomial: the total"):
        schedules.polynomial(1.0, -3)
    with pytest.raises(ValueError, match="step: the rate changes"):
        schedules.step(1.0, 0)
    with pytest.raises(ValueError, match="warm_up"):
        schedules.warm_up(schedules.constant(1.0), -1)
