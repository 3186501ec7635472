"""Which stat loggers an engine gets. Called by the faces, in the process that serves the metrics."""

from __future__ import annotations

from pagemill.config import EngineConfig
from pagemill.engine.prometheus import PrometheusStatLogger
from pagemill.engine.stats import LoggingStatLogger, StatLogger
from pagemill.executor.base import MemoryPlan


def make_stat_loggers(config: EngineConfig, plan: MemoryPlan) -> list[StatLogger]:
    """Return the log line and the Prometheus metrics, or nothing when statistics are off."""
    observability = config.observability
    if not observability.log_stats:
        return []
    return [
        LoggingStatLogger(observability.log_stats_interval_s),
        PrometheusStatLogger(
            observability.metrics_prefix,
            config.model.served_model_name,
            config.cache,
            config.model.max_model_len,
            plan.num_blocks,
            plan.host_tier,
        ),
    ]
