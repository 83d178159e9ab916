//! `jiffy-machine-agent`: runs inside the machine, says when it is ready, runs
//! programs for the host (`jiffy machine shell`, the test harness), and powers off.
//!
//! * [`ready`]: pushes readiness to the host.
//! * [`serve`]: connections and requests.
//! * [`exec`]: one program with its streams.
//! * [`power`]: the orderly end.

pub mod exec;
pub mod power;
pub mod ready;
pub mod serve;
