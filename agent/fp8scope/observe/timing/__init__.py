"""Measurements of every step besides the tensors: times, memory, learning rate, gradient norm, FLOP/s.

| scalar                     | is                                                                            |
|----------------------------|-------------------------------------------------------------------------------|
| `learning_rate`            | of the optimizer's first parameter group, as used in this step                |
| `learning_rate/groupN`     | of the groups after it, N from 1                                              |
| `grad_norm`                | global L2 norm of the gradients as the optimizer uses them: unscaled, clipped |
| `grad_norm_applied`        | the same, where the script logs a `grad_norm` of its own (before clipping)    |
| `grad_norm_local`          | of this rank's shards, where gradients are sharded (FSDP2)                    |
| `time_data`                | seconds from the end of the work before to the beginning of a forward pass    |
| `time_forward`             | seconds in the model's forward passes                                         |
| `time_backward`            | seconds in backward passes                                                    |
| `time_optimizer`           | seconds in the optimizer's step                                               |
| `time_other`               | the rest of the time since the step before ended                              |
| `model_flops_per_second`   | the model's operations over the sum of the five times                         |
| `hardware_flops_per_second` | the same with recomputed operations                                          |
| `mfu`, `hfu`               | the two over the device's dense BF16 peak, where that is known                |
| `anatomy/<part>_seconds`   | the same time divided further, see `observe.timing.anatomy`                   |
| `memory_allocated`, `memory_reserved`, `memory_peak` | bytes of the CUDA allocator                         |
| `memory_rss`               | bytes resident in main memory                                                 |
| `memory_anonymous`         | those of them that belong to no file; on Linux                                |
| `gpu_...`                  | what the GPU's driver says, see `observe.timing.driver`                       |

Memory and what the driver says are looked at once a second, and belong to the step that is recorded next.
"""

from fp8scope.observe.timing.observer import Measures, StepMeasurements

__all__ = ["Measures", "StepMeasurements"]
