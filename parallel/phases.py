"""The hand-over of device memory between training and generation, as one cycle of named moves.

    training -wake_weights-> weights_awake -reshard-> weights_written -free_training-> training_freed
        ^                                                                                   |
        +--restore_training-- asleep <-sleep-- generating <-wake_cache----------------------+

Each move is a function given at construction; a move that the state does not allow raises, so memory that is asleep is
never touched. After every move the ledger records device and host memory, and the most in every state and move. On cpu
the moves do little, the cycle is the same. The weights are woken before the cache, and training copies leave before the
cache comes: the peak stays low.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

CYCLE = {
    "training": ("wake_weights", "weights_awake"),
    "weights_awake": ("reshard", "weights_written"),
    "weights_written": ("free_training", "training_freed"),
    "training_freed": ("wake_cache", "generating"),
    "generating": ("sleep", "asleep"),
    "asleep": ("restore_training", "training"),
}


PLANNED = {
    "generate": ("wake_cache", "generating", "sleep"),
    "sync": ("wake_weights", "weights_awake", "reshard", "weights_written", "free_training"),
    "update": ("restore_training", "training"),
}
"""Phase of launch.plan's memory table -> states and moves of the hand-over."""


@dataclass
class PhaseMachine:
    moves: Mapping[str, Callable[[], None]]
    memory: Callable[[], dict[str, int]]
    """Bytes by name, for example allocated and free; called after every move."""
    peaks: Callable[[], dict[str, int]]
    """Most bytes since the last call, by name; called before and after every move."""
    timer: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext()
    """Context manager around each move, for times, deadlines and stack dumps."""
    state: str = "training"
    ledger: dict[str, dict[str, int]] = field(default_factory=dict)
    """Move -> memory after it, the last time that it was done."""
    before: dict[str, int] = field(default_factory=dict)
    """Memory before the first move."""
    highest: dict[str, dict[str, int]] = field(default_factory=dict)
    """State or move -> peaks during it, the last time."""

    def __post_init__(self) -> None:
        missing = {move for move, _ in CYCLE.values()} - set(self.moves)
        assert not missing, f"moves without a function: {sorted(missing)}"

    def do(self, move: str) -> None:
        """Run one move. RuntimeError when the state does not allow it."""
        legal, following = CYCLE[self.state]
        if move != legal:
            raise RuntimeError(f"phase machine: {move} is illegal while {self.state}; only {legal} is possible")
        self.highest[self.state] = self.peaks()
        self.before = self.before or self.memory()
        with self.timer(move):
            self.moves[move]()
        self.state = following
        self.highest[move] = self.peaks()
        self.ledger[move] = self.memory()

    def require(self, state: str) -> None:
        """RuntimeError unless the machine is in `state`."""
        if self.state != state:
            raise RuntimeError(f"phase machine: needs {state}, but is {self.state}")

    def planned_peaks(self) -> dict[str, int]:
        """Most bytes on the device by phase of launch.plan, in the last cycle; 0 for a phase that did not come yet."""
        most = {name: peak["device"] for name, peak in self.highest.items()}
        return {phase: max(most.get(part, 0) for part in parts) for phase, parts in PLANNED.items()}

    def to_generating(self) -> None:
        """From training: weights go into the engine, training state leaves the device, the engine is ready."""
        for move in ("wake_weights", "reshard", "free_training", "wake_cache"):
            self.do(move)

    def to_training(self) -> None:
        """From generating: the engine sleeps, training state is back."""
        for move in ("sleep", "restore_training"):
            self.do(move)
