//! Recordings of what ran where (`jiffy sched trace`).

use crate::sched::Class;
use serde::{Deserialize, Serialize};

/// Answer of `POST /v1/sched/trace`: which thread ran on which CPU, by the kernel's tracepoints. Times
/// are of `CLOCK_MONOTONIC`, in nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedTrace {
    /// The clock: boot id of the host's kernel.
    pub clock: String,
    /// When the recording began.
    pub begin_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// The CPUs' numbers.
    pub cpus: Vec<u32>,
    /// Events that were not recorded, because a CPU's buffer was full. The first ones are kept.
    pub lost: u64,
    /// The policy for sched_ext that scheduled the host; `None` for the kernel's own scheduler.
    pub policy: Option<String>,
    /// The threads that ran.
    pub threads: Vec<SchedThread>,
    /// When they ran, in the order of their ends.
    pub runs: Vec<SchedRun>,
}

/// A thread that ran.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedThread {
    /// Its thread id.
    pub tid: u32,
    /// Its process id.
    pub pid: u32,
    /// Its name, the last one that it had; chosen by the program.
    pub name: String,
    /// The name of its process; chosen by the program.
    pub process: String,
    /// The VM whose monitor its process is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
}

/// A thread on a CPU, from one switch to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Row", into = "Row")]
pub struct SchedRun {
    /// The CPU's number.
    pub cpu: u32,
    /// The thread's position in [`SchedTrace::threads`].
    pub thread: u32,
    /// When it began to run.
    pub start_ns: u64,
    /// When it stopped.
    pub end_ns: u64,
    /// How long it could have run before, since it was woken or preempted; 0 if that is not known.
    pub waited_ns: u64,
    /// Its class, if `jiffy-sched` scheduled the host; `None` also for real-time tasks.
    pub class: Option<Class>,
}

/// As JSON, a run is an array, because there are many.
type Row = (u32, u32, u64, u64, u64, Option<Class>);

impl From<Row> for SchedRun {
    fn from((cpu, thread, start_ns, end_ns, waited_ns, class): Row) -> SchedRun {
        SchedRun {
            cpu,
            thread,
            start_ns,
            end_ns,
            waited_ns,
            class,
        }
    }
}

impl From<SchedRun> for Row {
    fn from(run: SchedRun) -> Row {
        (
            run.cpu,
            run.thread,
            run.start_ns,
            run.end_ns,
            run.waited_ns,
            run.class,
        )
    }
}
