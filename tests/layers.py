"""The layers of the project, which test_architecture.py walks."""

from __future__ import annotations

import re

# From the ground up: the layer, then its modules. A module imports from its own layer or from one
# that stands before it here. "." is bigtrain itself.
TABLE = """
words:      errors units restart
job:        arguments cluster collectives config configs configs.clusters configs.jobs
            configs.strategies deepspeed_file environment imports loading
memory:     budget cap cuts floors forecast lean_adamw low_bit memory precision replay room
            schedules seeds shards timeline traffic
learning:   block_costs blocks blueprint chunked_loss fakes heads linear_loss keeping
            cutting cutting.balance cutting.calls cutting.choose cutting.compare cutting.cut
            cutting.ghost cutting.intervals cutting.points cutting.rehearsal
            cutting.script cutting.stage cutting.state cutting.structure cutting.traces
            cutting.tracer carriers deferred moved operations recompute recorder recording saved
            tasks visits
            data data.catalog data.digits data.folders data.images data.loader data.sampler
            data.seeding data.source data.synthetic data.text data.voc
            models models.gpt models.imported models.lenet models.torchvision_models
ranks:      distributed failures guard launch link_rates rates rendezvous this_cluster threads
            watch
seam:       chain checkpoint fill fitting home layout live optim pieces released
            pipeline_relay pipeline_stage pipeline_state pipeline_ties pipelines
            profiles replayed replicas residuals runner stage_profiles strategy update
strategies: strategies strategies.accumulation strategies.checkpointing strategies.ddp
            strategies.layer_split strategies.offload strategies.single
            strategies.pipeline strategies.pipeline.deepspeed_engine
            strategies.pipeline.deepspeed_runner strategies.pipeline.deepspeed_start
            strategies.pipeline.fairscale_engine
            strategies.pipeline.fairscale_runner strategies.pipeline.options
            strategies.pipeline.torch_engine strategies.pipeline.wires
            strategies.zero strategies.zero.advice strategies.zero.deepspeed_build
            strategies.zero.deepspeed_config strategies.zero.deepspeed_engine
            strategies.zero.deepspeed_forecast strategies.zero.deepspeed_offload
            strategies.zero.deepspeed_runner strategies.zero.deepspeed_shards
            strategies.zero.deepspeed_share strategies.zero.deepspeed_traffic
            strategies.zero.deepspeed_update
            strategies.zero.fairscale_engine
            strategies.zero.fairscale_forecast strategies.zero.fairscale_fsdp
            strategies.zero.fairscale_traffic
            strategies.zero.fully_sharded strategies.zero.fully_sharded_forecast
            strategies.zero.options strategies.zero.sharded_optimizer
build:      build exhausted listing pass_prices predict registry remedies settle
engine:     adapt door engine parts
            report report.lines report.memory_report report.run_log report.tables
commands:   . __main__ cli compare compare.command compare.largest compare.page compare.pictures
            compare.rows compare.table contenders doctor planner planner.anatomy planner.asked
            planner.auto planner.clock planner.command planner.compose planner.dissect planner.fit
            planner.halves planner.judge planner.ladder planner.offer planner.picture
            planner.search planner.sections planner.shorten planner.space processes record
            surroundings train
            verify verify.command verify.differences
"""
LAYERS = {
    name: ["" if module == "." else module for module in modules.split()]
    for name, modules in re.findall(r"^(\w+):((?:.*\n)(?:\s.*\n)*)", TABLE, re.MULTILINE)
}
