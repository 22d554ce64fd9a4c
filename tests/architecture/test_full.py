"""The tests marked `full`, by name and number of cases, and the options that select them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.full import EVERY_FULL, fewer, in_turn
from support.zygote import interpreter, surroundings

ROOT = Path(__file__).parents[2]
# The number of cases of each test that run only on demand. Each of these is tested in every run in
# fewer cases or at smaller length by the same test; this must hold for any entry that is added.
FULL = {
    "activations/test_budget_solver.py::test_many_different_blocks_with_five_choices_are_chosen"
    "_for_in_seconds": 1,
    "checkpoint/test_damage.py::test_a_thousand_random_damages_are_refused": 1,
    "checkpoint/test_drawn_damages.py::test_a_thousand_damages_are_refused_and_gone_back_from": 1,
    "checkpoint/test_ranks_slices.py::test_slices_are_saved_whole_and_opened_from_whole_ones": 4,
    "checkpoint/test_ranks_slices.py::test_what_optimizers_keep_in_slices_is_saved_and_opened": 2,
    "checkpoint/test_foreign.py::test_a_process_that_converts_grows_by_a_few_pieces": 1,
    "costs/test_ranks_textbook.py::test_all_ranks_together_send_what_the_formula_says": 25,
    "costs/test_ranks_traffic.py::test_stages_send_each_other_one_part_for_each_rank_of_slices": 7,
    "cutting/test_torchvision_models.py::test_a_cut_model_is_the_whole_model": 76,
    "doctor/test_checks.py::test_checks_run_by_the_command_and_leave_one_file": 1,
    "data/test_ranks_tokens.py::test_numbers_are_those_of_a_plain_loop": 9,
    "engine/test_ranks_ema.py::test_an_average_is_that_of_a_plain_loop": 10,
    "engine/test_ranks_state_peaks.py::test_a_save_and_a_resume_hold_what_was_forecast": 10,
    "hub/test_ranks_hub.py::test_every_family_trains_and_opens_again": 14,
    "hub/test_ranks_lora.py::test_a_fault_of_another_project_would_be_found": 3,
    "hub/test_ranks_lora.py::test_adapters_are_those_of_a_plain_loop": 25,
    "hub/test_ranks_lora.py::test_every_case_is_opened_again": 4,
    "hub/test_ranks_lora.py::test_their_peaks_are_predicted": 5,
    "job/test_deepspeed_public.py::test_what_is_not_refused_trains": 22,
    "models/test_torchvision_models.py::test_every_torchvision_model_is_deferred_and_initialised"
    "_as_usual": 61,
    "own_loop/test_ranks_evaluation.py::test_every_rank_has_the_figures_of_all_rows": 14,
    "own_loop/test_ranks_trainer.py::test_it_equals_a_plain_loop_and_goes_on_under_another"
    "_strategy": 15,
    "own_loop/test_your_loop_page.py::test_the_page_runs_as_it_stands": 2,
    "own_loop/test_ranks_schedules.py::test_a_scheduler_moves_what_updates": 20,
    "planner/test_drawn_plans.py::test_a_plan_is_forecast_as_its_run": 6,
    "planner/test_search.py::test_backward_passes_in_two_parts_are_forecast_as_such": 4,
    "planner/test_search.py::test_many_blocks_are_forecast_as_each_of_them": 22,
    "prediction/test_ranks_compiled_peaks.py::test_the_peak_of_compiled_blocks_is_foretold": 9,
    "prediction/test_section_library.py::test_a_model_put_together_is_forecast_as_a_whole_one": 22,
    "prediction/test_ranks_optimizer_peaks.py::test_every_optimizer_of_torch_on_every_engine": 18,
    "prediction/test_ranks_peaks_of_stages.py::test_every_rank_of_every_schedule": 11,
    "prediction/test_ranks_peaks_of_uses.py::test_the_peak_of_odd_uses_of_parameters_is"
    "_predicted": 5,
    "prediction/test_ranks_peaks_of_ways.py::test_the_fullest_way_is_forecast": 3,
    "prediction/test_ranks_recurrent_peaks.py::test_the_peak_of_recurrent_layers_is_predicted": 5,
    "prediction/test_ranks_peaks_of_stages.py::test_several_stages_of_a_rank_are_sharded_with"
    "_nothing_left_over": 1,
    "published/test_three_dimensions.py::test_replicas_are_faster_than_more_ranks_of_another"
    "_axis": 6,
    "published/test_three_dimensions.py::test_slices_of_a_node_and_pipelines_between_nodes_are"
    "_fastest": 2,
    "ranks/test_ranks_agreement.py::test_the_command_is_refused_in_one_line_and_leaves_nothing": 2,
    "ranks/test_ranks_launchers.py::test_a_connection_that_is_held_open_to_the_end": 2,
    "ranks/test_ranks_launchers.py::test_a_killed_rank_ends_all": 9,
    "ranks/test_ranks_launchers.py::test_a_stop_ends_all_quietly": 2,
    "ranks/test_ranks_launchers.py::test_one_failure_ends_all": 12,
    "ranks/test_ranks_launchers.py::test_the_ranks_find_each_other": 5,
    "recorder/test_ranks_flight_recorder.py::test_a_rank_that_is_stopped": 1,
    "strategies/test_ranks_accuracy.py::test_it_is_within_a_point_of_ddp": 3,
    "strategies/test_ranks_inner_gradients.py::test_it_is_as_in_a_plain_loop_or_refused_in_a"
    "_line": 5,
    "strategies/test_ranks_transformers.py::test_stock_models_train_as_in_a_plain_loop": 4,
    "test_beyond_one_loss.py::test_what_is_frozen_at_first_trains_after_a_save": 2,
    "strategies/test_ranks_odd_parameters.py::test_what_users_write_is_right_or_refused_by"
    "_name": 20,
    "slice_planning/test_planned_exchanges.py::test_exchanges_of_a_plan_are_those_of_its"
    "_slices": 27,
    "slice_planning/test_sound_classes.py::test_classes_of_torchvision": 4,
    "slicing/test_ranks_attention.py::test_heads_in_slices_have_the_gradients_of_one_process": 1,
    "slicing/test_ranks_calls.py::test_calls_on_slices_of_more_ranks": 4,
    "slicing/test_ranks_fakes.py::test_more_fakes_exchange_what_ranks_exchange": 2,
    "slicing/test_ranks_fuzz.py::test_many_random_slices": 12,
    "slicing/test_ranks_losses.py::test_chunks_of_a_head_in_slices": 1,
    "slicing/test_ranks_memory.py::test_a_run_on_fake_tensors_has_the_memory_of_each_rank": 1,
    "slicing/test_ranks_peaks.py::test_every_rank_with_other_techniques": 5,
    "slicing/test_ranks_peaks.py::test_the_first_ranks_peak_is_predicted_to_the_byte": 5,
    "slicing/test_ranks_sequence.py::test_sequence_shards_have_the_gradients_of_one_process": 4,
    "strategies/test_ranks_checkpointing.py::test_a_budget_is_kept_and_used": 3,
    "strategies/test_ranks_offload.py::test_checkpoints_go_both_ways": 4,
    "strategies/test_ranks_offload_on_host.py::test_late_copies_change_nothing": 24,
    "strategies/test_ranks_tensor.py::test_models_in_slices_equal_one_process": 3,
    "strategies/test_ranks_tensor.py::test_stages_that_send_each_other_parts_equal_one_process": 3,
    "strategies/zero/test_ranks_on_deepspeed.py::test_it_equals_one_process": 4,
    "strategies/zero/test_ranks_on_deepspeed.py::test_the_peak_of_every_rank_is_predicted": 3,
    "strategies/zero/test_ranks_on_fairscale.py::test_the_peak_of_the_fullest_rank_is_predicted": 2,
    "strategies/zero/test_ranks_on_torch.py::test_more_sharding_is_less_memory_and_the_peak_is"
    "_predicted": 1,
    "strategies/zero/test_ranks_on_torch.py::test_the_numbers_are_those_of_one_process": 5,
    "timing/test_block_seconds.py::test_ranks_of_this_machine_time_a_job": 1,
    "test_golden.py::test_what_is_known_without_running_is_what_it_was": 1,
    "test_hostile_inputs.py::test_hundreds_of_inputs_end_in_a_line_or_run": 2,
    "test_ranks_survival.py::test_a_rank_that_stands_still_is_ended": 1,
    "test_ranks_survival.py::test_under_torchrun_a_rank_that_is_stopped_in_a_save_is_named": 1,
    "test_ranks_faults.py::test_faults_at_random_change_no_number": 2,
    "test_ranks_hosts.py::test_launchers_train_over_two_hosts": 3,
    "test_docs.py::test_the_train_commands_of_the_readme_run_dry": 8,
    "verify/test_command.py::test_batchnorm_is_compared_in_equal_micro_batches": 1,
    "verify/test_command.py::test_bf16_parameters_are_held_against_one_process_that_has_them": 1,
    "verify/test_command.py::test_dropout_is_the_same_in_one_process_and_in_stages": 1,
    "verify/test_command.py::test_dropout_that_is_tied_to_no_samples_is_off_and_named": 1,
    "verify/test_fuzz.py::test_a_seeded_fault_is_found_and_made_small": 1,
    "verify/test_localise.py::test_a_wrong_rule_of_slices_is_named_with_its_block": 1,
    "verify/test_localise.py::test_seeded_faults_are_named_by_the_command": 5,
    "checkpoint/test_ranks_slices.py::test_other_strategies_open_what_slices_have_saved_and_the"
    "_other_way_round": 2,
    "compare/test_command.py::test_largest_is_where_it_stops_fitting": 1,
    "core/test_ranks_participation.py::test_what_not_every_step_or_rank_uses": 6,
    "costs/test_ranks_traffic.py::test_real_ranks_exchange_what_is_stated": 22,
    "planner/test_search.py::test_a_plan_is_forecast_as_the_run_of_its_file": 2,
    "prediction/test_ranks_peaks.py::test_each_rank_of_slices_has_the_peak_that_was_predicted": 4,
    "strategies/test_ranks_checkpointing.py::test_under_other_strategies_the_numbers_are_those"
    "_of_one_process": 6,
    "strategies/test_ranks_classic_parity.py::test_losses_and_weights_of_sgd_are_those_of_one"
    "_process": 2,
    "strategies/test_ranks_classic_parity.py::test_losses_of_adamw_are_those_of_one_process": 2,
    "strategies/test_ranks_tensor.py::test_models_that_look_at_their_own_sizes_equal_one"
    "_process": 1,
    "strategies/test_ranks_tensor.py::test_slices_beside_stages_and_replicas_on_eight_ranks"
    "_equal_one_process": 1,
    "strategies/test_ranks_tensor.py::test_parts_change_no_bit": 1,
    "strategies/test_ranks_user_losses.py::test_losses_of_users_are_those_of_a_plain_loop": 4,
    "strategies/zero/test_ranks_on_deepspeed.py::test_a_checkpoint_goes_from_one_strategy_to"
    "_another": 4,
    "strategies/zero/test_ranks_on_fairscale.py::test_it_equals_one_process_in_float64": 4,
    "strategies/zero/test_ranks_on_fairscale.py::test_a_checkpoint_goes_from_one_strategy_to"
    "_another": 3,
    "test_ranks_train_launchers.py::test_two_ranks_train_under": 3,
    "planner/test_search.py::test_what_the_table_calls_a_plan_is_typed_back": 1,
    "planner/test_tensor_axis.py::test_a_plan_with_slices_is_forecast_as_its_run": 11,
    "prediction/test_ranks_optimizer_peaks.py::test_a_step_is_forecast_as_the_optimizer_takes"
    "_it": 4,
    "prediction/test_ranks_peaks.py::test_on_one_rank_fully_shard_copies_without_buffers_of_an"
    "_exchange": 4,
    "prediction/test_ranks_peaks_of_stages.py::test_the_optimizers_step_is_one_for_all_stages_of"
    "_a_rank": 3,
    "prediction/test_ranks_peaks_of_stages.py::test_recomputed_micro_batches": 2,
    "strategies/test_ranks_checkpointing.py::test_one_process_computes_the_same_to_the_last_bit"
    "_dropout_on": 4,
    "strategies/test_ranks_checkpointing.py::test_under_deepspeed": 1,
    "strategies/test_ranks_parity.py::test_ddp_equals_one_process_in_float64": 10,
    "strategies/zero/test_ranks_on_deepspeed.py::test_a_micro_batch_may_do_without_a_parameter": 3,
    "strategies/zero/test_ranks_on_torch.py::test_bf16_stays_near_and_the_saved_weights_are"
    "_fp32": 2,
    "checkpoint/test_ranks_tied_in_stages.py::test_it_is_saved_once_and_goes_on_under_any"
    "_strategy": 3,
    "costs/test_ranks_traffic.py::test_deepspeeds_stage_3_gathers_what_is_stated_and_tied"
    "_parameters_again": 2,
    "cutting/test_stage.py::test_a_cut_at_every_place_changes_nothing": 16,
    "cutting/test_stage.py::test_four_stages_change_nothing": 31,
    "engine/test_ranks_device_reads.py::test_replicas_wait_for_the_loss_and_for_the_norm": 2,
    "engine/test_ranks_device_reads.py::test_of_a_pipeline_the_rank_with_the_loss_waits_once"
    "_more": 2,
    "engine/test_ranks_training_accuracy.py::test_ranks_micro_batches_and_stages_count_the"
    "_global_batch": 3,
    "pipeline/test_ranks_frozen_stages.py::test_stages_without_trained_parameters": 6,
    "pipeline/test_ranks_frozen_stages.py::test_their_checkpoints_go_on_under_other_strategies": 1,
    "pipeline/test_ranks_frozen_stages.py::test_losses_that_ask_for_values_and_outputs_that"
    "_change": 1,
    "planner/test_bounds.py::test_the_search_finds_the_fastest_plan": 1,
    "ranks/test_ranks_launchers.py::test_the_users_fault_is_said_once": 3,
}


def collected(folder: Path, *words: str) -> list[str]:
    """The names of the tests that a command line would run."""
    command = [interpreter(), "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *words], cwd=folder, env=surroundings(), capture_output=True, text=True
    )
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_nothing_is_left_for_another_day_but_what_stands_here(
    request: pytest.FixtureRequest,
) -> None:
    names = request.config.stash.get(EVERY_FULL, None)
    if names is None:  # this run contains only some files
        names = collected(ROOT, "-m", "full")
    counts = Counter(re.sub(r"\[.*", "", name.removeprefix("tests/")) for name in names)
    assert counts == FULL


def test_a_plain_run_leaves_out_what_is_marked_and_two_options_take_it_in(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.full\n"
        "@pytest.mark.parametrize('n', range(4))\n"
        "def test_long(n): pass\n"
        "def test_short(): pass\n"
    )
    plugin = ("-p", "support.full")
    assert collected(tmp_path, *plugin) == ["test_some.py::test_short"]
    assert len(collected(tmp_path, *plugin, "--full")) == 5
    assert len(collected(tmp_path, *plugin, "-m", "full")) == 4
    named = "test_some.py::test_long[3]"
    assert collected(tmp_path, *plugin, named) == [named]


def daily(cases: list[Any]) -> list[tuple[Any, ...]]:
    """The values of the parameters of the cases that are not marked full."""
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize(
    ("count", "wanted"), [(0, []), (1, [0]), (2, [0, 6]), (3, [0, 3, 6]), (7, [*range(7)])]
)
def test_a_few_cases_are_spread_evenly_and_the_others_full(count: int, wanted: list[int]) -> None:
    cases = fewer(range(7), count)
    assert [values for case in cases for values in case.values] == [*range(7)]
    assert daily(cases) == [(n,) for n in wanted]


def test_cases_of_several_values_and_those_with_marks_stay_as_they_are() -> None:
    skipped = pytest.mark.skip(reason="no")
    cases = fewer([("a", 1), pytest.param("b", 2, marks=skipped, id="of b")], 1)
    assert daily(cases) == [("a", 1)]
    assert (cases[1].values, cases[1].id) == (("b", 2), "of b")
    assert [mark.name for mark in cases[1].marks] == ["skip", "full"]
    assert daily(in_turn("ab", [(1, 2), (3, 4)])) == [("a", 1, 2), ("b", 3, 4)]
