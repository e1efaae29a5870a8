"""The hand-over cycle: legal order, illegal moves, the ledger."""

import pytest

from parallel.phases import CYCLE, PhaseMachine


def machine(log=None):
    log = [] if log is None else log
    moves = {move: (lambda move=move: log.append(move)) for move, _ in CYCLE.values()}
    return PhaseMachine(moves, lambda: {"allocated": len(log)}, lambda: {"device": len(log)}), log


def test_one_cycle_runs_every_move_in_order_and_records_memory():
    phases, log = machine()
    phases.to_generating()
    phases.require("generating")
    phases.to_training()
    phases.require("training")
    assert log == ["wake_weights", "reshard", "free_training", "wake_cache", "sleep", "restore_training"]
    assert phases.ledger == {move: {"allocated": i} for i, move in enumerate(log, 1)}
    told = {name: peak["device"] for name, peak in phases.highest.items()}
    assert [told[state] for state in CYCLE] == list(range(6)) and [told[move] for move in log] == list(range(1, 7))
    assert phases.planned_peaks() == {"generate": 5, "sync": 3, "update": 6}
    phases.do("wake_weights")
    assert list(phases.ledger) == log[:6] and phases.ledger["wake_weights"] == {"allocated": 7}


@pytest.mark.parametrize("state", CYCLE)
def test_every_other_move_is_refused_in_every_state(state):
    phases, log = machine()
    while phases.state != state:
        phases.do(CYCLE[phases.state][0])
    before = len(log)
    for move, _ in CYCLE.values():
        if move != CYCLE[state][0]:
            with pytest.raises(RuntimeError, match=f"{move} is illegal while {state}; only {CYCLE[state][0]}"):
                phases.do(move)
    assert len(log) == before and phases.state == state


def test_a_move_that_fails_leaves_the_state():
    phases, _ = machine()
    phases.moves = {**phases.moves, "wake_weights": lambda: 1 / 0}
    with pytest.raises(ZeroDivisionError):
        phases.to_generating()
    assert phases.state == "training"


def test_require_names_both_states():
    with pytest.raises(RuntimeError, match="needs generating, but is training"):
        machine()[0].require("generating")


def test_a_move_without_a_function_is_refused():
    with pytest.raises(AssertionError, match="sleep"):
        PhaseMachine({move: print for move, _ in CYCLE.values() if move != "sleep"}, dict, dict)
