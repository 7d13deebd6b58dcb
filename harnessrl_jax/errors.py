"""Every error raised on purpose, as one small tree.

HarnessRLError
├── ConfigError        a configuration file or override cannot be used
├── RecordError        a captured record breaks its schema
├── LineageError       calls of a rollout contradict each other
├── PackingError       a batch cannot be laid out as asked
├── ModelError         a model configuration or an array it was given has the wrong form
├── LossError          a loss is asked for with a setting it is not defined for
├── PartitionError     CAPO: a unit map or a partition does not fit the parameters
├── ShardingError      a parameter or mesh no rule covers
├── WeightsError       a weights file does not fit the model
├── CheckpointError    a checkpoint cannot be written or restored
├── SamplerError       the sampler cannot serve a request
│   └── WishError      it never can, however often it is asked
├── TextError          a tokenizer or chat template cannot be used
├── GatewayError       a request at the model interface is refused
├── StoreError         the call store cannot be opened, read or written
├── TaskError          a task source or its data cannot be used
├── RolloutError       a harness program cannot be run
├── MonitorError       metrics or a report cannot be written or read
└── HostError          another process of the run has ended

A message says where, what was given, what was wanted and what to do.
"""


class HarnessRLError(Exception):
    """Base class: catch this to catch every deliberate error of the library."""


class ConfigError(HarnessRLError):
    """A configuration file or override cannot be used."""


class RecordError(HarnessRLError):
    """A captured record breaks its schema."""


class LineageError(HarnessRLError):
    """Calls of a rollout contradict each other."""


class PackingError(HarnessRLError):
    """A batch cannot be laid out as asked."""


class ModelError(HarnessRLError):
    """A model configuration, or an array given to a model, has the wrong form."""


class LossError(HarnessRLError):
    """A loss is asked for with a setting it is not defined for."""


class PartitionError(HarnessRLError):
    """A CAPO unit map or partition does not fit the parameters."""


class ShardingError(HarnessRLError):
    """A parameter or a mesh that no sharding rule covers."""


class WeightsError(HarnessRLError):
    """A weights file does not fit the model."""


class CheckpointError(HarnessRLError):
    """A checkpoint cannot be written or restored."""


class SamplerError(HarnessRLError):
    """The sampler cannot serve a request."""


class WishError(SamplerError):
    """A request asks for what this sampler does not have; the same request will fail again."""


class TextError(HarnessRLError):
    """A tokenizer or a chat template cannot be used."""


class GatewayError(HarnessRLError):
    """A request at the model interface is refused."""


class StoreError(HarnessRLError):
    """The call store cannot be opened, read or written."""


class TaskError(HarnessRLError):
    """A task source or its data cannot be used."""


class RolloutError(HarnessRLError):
    """A harness program cannot be run."""


class MonitorError(HarnessRLError):
    """Metrics or a report cannot be written or read; a metric that is not finite."""


class HostError(HarnessRLError):
    """Another process of a run on several hosts has ended or failed."""
