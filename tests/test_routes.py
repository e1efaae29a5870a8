"""Cutting captured experts by request, expert load, and the live expert map, without an engine."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rollout.routes import (
    RouteCapture,
    expert_map,
    layer_of,
    restore_maps,
    routes_dtype,
    save_maps,
)


def capture_of(layers, num_layers, experts=8, split=False):
    """A RouteCapture whose engine is a list of steps: see `run`."""
    capture = RouteCapture.__new__(RouteCapture)
    capture.num_layers, capture.dtype, capture.split_over_tp = num_layers, routes_dtype(experts), split
    capture.step, capture.rows = {}, {}
    hooks = {layer: capture._keep(layer) for layer in layers}

    def execute(scheduled):
        for layer, hook in hooks.items():
            hook(torch.tensor([[10 * layer + t, 10 * layer + t + 1] for t in scheduled.ids]))
        return "output"

    capture._execute = execute
    return capture


def run(capture, *parts, padding=0):
    """One engine step of (request, first position, ids of its tokens)."""
    names = [name for name, _, _ in parts]
    capture.runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            num_computed_tokens_cpu=np.array([start for _, start, _ in parts]),
        )
    )
    scheduled = SimpleNamespace(
        ids=[i for _, _, ids in parts for i in ids] + [7] * padding,
        total_num_scheduled_tokens=sum(len(ids) for _, _, ids in parts),
        num_scheduled_tokens={name: len(ids) for name, _, ids in parts if ids},
    )
    assert capture._run(scheduled) == "output"


def test_rows_are_cut_by_request_and_position():
    capture = capture_of([0, 1], 2)
    run(capture, ("a", 0, [0, 1, 2]), ("b", 0, [5, 6]), padding=3)
    run(capture, ("b", 2, [7]), ("a", 3, [3]))
    run(capture, ("a", 4, []), ("b", 3, [8]))  # a waits
    routes = capture.take("a", 5)
    assert routes.dtype == np.uint8 and routes.shape == (4, 2, 2)
    assert routes[:, 0, 0].tolist() == [0, 1, 2, 3] and routes[:, 1, 1].tolist() == [11, 12, 13, 14]
    assert capture.take("b", 5)[:, 0, 0].tolist() == [5, 6, 7, 8] and not capture.rows


def test_a_preempted_request_keeps_its_later_choice():
    capture = capture_of([0], 1)
    run(capture, ("a", 0, [0, 1]))
    run(capture, ("a", 2, [2]))
    run(capture, ("a", 0, [4, 5, 6]))
    assert capture.take("a", 4)[:, 0, 0].tolist() == [4, 5, 6]


def test_dense_layers_first_do_not_shift_the_others():
    capture = capture_of([1, 3], 4)
    run(capture, ("a", 0, [0, 1]))
    routes = capture.take("a", 3)
    assert routes[:, :, 0].tolist() == [[0, 10, 0, 30], [0, 11, 0, 31]]


def test_missing_positions_are_an_error():
    capture = capture_of([0], 1)
    run(capture, ("a", 2, [2]))  # as after a prefix-cache hit
    with pytest.raises(RuntimeError, match="no routes of position 0 of 3"):
        capture.take("a", 4)


def test_names_and_types():
    assert layer_of("model.layers.12.mlp.experts") == 12
    assert routes_dtype(256) is np.uint8 and routes_dtype(257) is np.uint16


@dataclass
class State:
    """The fields of vLLM's EplbModelState that matter here."""

    physical_to_logical_map: torch.Tensor = field(default_factory=lambda: torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]]))
    logical_to_physical_map: torch.Tensor = field(default_factory=lambda: torch.arange(6).view(2, 3))
    model_name: str = "m"


def runner_of(state, is_async=False, model=None):
    return SimpleNamespace(
        eplb_state=SimpleNamespace(model_states={"m": state}, is_async=is_async),
        get_model=lambda: model or torch.nn.Module(),
    )


def test_expert_map_is_read_live_or_refused():
    state = State()
    assert expert_map(SimpleNamespace(eplb_state=None)) is None and expert_map(SimpleNamespace()) is None
    assert expert_map(runner_of(state)) == ((0, 1, 2, 0), (2, 1, 0, 1))
    state.physical_to_logical_map[0, 3] = 1
    assert expert_map(runner_of(state))[0] == (0, 1, 2, 1)
    with pytest.raises(RuntimeError, match="asynchronously"):
        expert_map(runner_of(state, is_async=True))


def test_maps_survive_a_sleep_that_loses_them():
    state = State()
    saved, addresses = save_maps(runner_of(state)), state.logical_to_physical_map.data_ptr()
    before = expert_map(runner_of(state))
    state.physical_to_logical_map.fill_(7), state.logical_to_physical_map.zero_()
    restore_maps(runner_of(state), saved)
    assert expert_map(runner_of(state)) == before and state.logical_to_physical_map.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state.logical_to_physical_map.data_ptr() == addresses


def test_maps_that_modules_hold_survive_too():
    """vLLM-Ascend keeps them as plain attributes; parameters, buffers and other attributes are not its business."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].expert_map, model[0].cache = torch.tensor([1, -1, 0], dtype=torch.int32), torch.ones(4)
    saved = save_maps(runner_of(State(), model=model))
    assert len(saved) == 3
    model[0].expert_map.fill_(9)
    restore_maps(runner_of(State(), model=model), saved)
    assert model[0].expert_map.tolist() == [1, -1, 0]
