//! What `jiffy-sched` writes into the policy's maps. The policy itself is `bpf/policy.bpf.c`
//! (docs/scheduler.md).

pub mod told;
