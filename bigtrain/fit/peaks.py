"""The peaks of a plan while it loads, trains, saves and resumes, on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigtrain.assembly.make_plan import make_plan
from bigtrain.assembly.resolve import lay_slices, make_layout
from bigtrain.assembly.state_peaks import forecast_state_peaks
from bigtrain.core.resolved import ResolvedPlan
from bigtrain.costs.forecast import Forecast
from bigtrain.devices import is_accelerator
from bigtrain.memory.added_bytes import StatePeak
from bigtrain.models.parameters import first_named_tensors
from bigtrain.planner.ask import PlannedAnswer
from bigtrain.planner.evaluate import EvaluatedPlan
from bigtrain.prediction.fake_runs.runs import resize_micro_batch
from bigtrain.prediction.predict import Prediction
from bigtrain.tensors.shards import COPIED_BYTES


@dataclass(frozen=True)
class PhasePeaks:
    """The peaks of each phase, the highest over all ranks, on the device and on its host."""

    load: StatePeak
    """While the parameters get their values: a rank's share of them, and a piece of a file or the
    largest tensor that no file has."""
    train: StatePeak
    """During the steps of training."""
    save: StatePeak | None
    """During a save; None if the optimizer cannot be run on tensors without values."""
    resume: StatePeak | None
    """During a resume; None in the same case as `save`."""

    @property
    def by_name(self) -> Mapping[str, StatePeak | None]:
        """The peaks by the names of the phases, in the order of a run."""
        return {
            "load": self.load,
            "train": self.train,
            "save": self.save,
            "resume": self.resume,
        }


def phase_peaks(planned: PlannedAnswer, evaluated: EvaluatedPlan) -> PhasePeaks:
    """Predict the peaks of all phases of a plan.

    Args:
        planned: the planner's answer.
        evaluated: one of the plans of the answer.

    Raises:
        ConfigError: a stage or a slice cannot be made.
    """
    evaluator, opened = planned.search.evaluator, planned.setup.workload
    batch = resize_micro_batch(opened.micro_batch, evaluated.candidate.rows)
    workload = replace(opened, example=batch)
    cluster, devices = planned.question.cluster, planned.question.devices
    one_host = devices <= cluster.node.devices
    plan = make_plan(evaluated.job, devices, cluster.device.kind, one_host=one_host)
    layout, slices = None, None
    if plan.pp > 1:
        layout = make_layout(plan, workload)
    if plan.tp > 1:
        slices = lay_slices(plan, workload)
    resolved = ResolvedPlan.of(plan, workload.model, layout, slices)
    host = evaluator.host_state_bytes(evaluated.candidate, evaluated.plan)
    forecasts = evaluator.forecasts(evaluated)
    load = train = StatePeak(0)
    save: StatePeak | None = None
    resume: StatePeak | None = None
    for rank, peak in evaluated.peaks.items():
        load = load.or_higher(_load(planned, forecasts[rank]))
        train = train.or_higher(StatePeak(peak.bytes, host))
        prediction = Prediction(peak, own_peak=peak, states=forecasts[rank].states)
        config = planned.question.job.checkpoint
        state = forecast_state_peaks(resolved, workload, config, prediction, rank)
        if state.save is not None and state.resume is not None:
            kept = StatePeak(state.save.bytes, state.save.host_bytes + host)
            save = kept.or_higher(save)
            again = StatePeak(state.resume.bytes, state.resume.host_bytes + host)
            resume = again.or_higher(resume)
    return PhasePeaks(load, train, save, resume)


def _load(planned: PlannedAnswer, forecast: Forecast) -> StatePeak:
    """Return the peak while a rank's parameters and buffers get their values.

    A tensor is read from a file in pieces, directly into its memory on the device, where it may be
    cast to another dtype. A tensor that no file has is made on the host. See docs/pretrained.md.
    """
    setup, states = planned.setup, forecast.states
    tensors = first_named_tensors(setup.workload.model)
    sizes = {name: 4 * tensor.numel() for name, tensor in tensors.items()}
    largest = max((n for name, n in sizes.items() if not _is_read(planned, name)), default=0)
    read = max((n for name, n in sizes.items() if _is_read(planned, name)), default=0)
    piece = min(COPIED_BYTES, read)
    share = states.parameters + states.frozen + states.buffers
    if setup.workload.whole_bytes:
        share = max(share, setup.workload.whole_bytes)
    on_host = not is_accelerator(planned.question.cluster.device.kind)
    temporary = max(largest, piece if on_host else 0)
    device = max(share + min(temporary, share), forecast.building.total)
    return StatePeak(device) if on_host else StatePeak(device, max(piece, largest))


def _is_read(planned: PlannedAnswer, name: str) -> bool:
    """Whether a tensor is read from files in pieces.

    A model of the Hub whose weights are not here will be read, too, except for its adapters.
    """
    widths = planned.setup.workload.read_widths
    if widths:
        return name in widths
    return planned.setup.model.hub is not None and ".lora_" not in name
