//! Work at a lower priority than the program's other work.

use std::panic::resume_unwind;
use std::thread;

/// Added to the nice value for work that nobody waits for.
pub const BACKGROUND: i32 = 19;
/// Added to the nice value for long computations that a client waits for. Beside a busy thread of
/// the normal nice value, such a thread gets a quarter of the processor.
pub const AWAITED: i32 = 5;

/// Runs blocking `work` on a thread of its own, whose nice value is higher by `nice`. Threads that it
/// starts inherit that.
///
/// The caller's thread is not changed, because without privileges a nice value can't be lowered
/// again. If it can't be raised, the work is done with the caller's.
pub fn lowered<T: Send>(nice: i32, work: impl FnOnce() -> T + Send) -> T {
    if nice == 0 {
        return work();
    }
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let _ = rustix::process::nice(nice);
            work()
        });
        worker.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::getpriority_process;

    fn own_nice() -> i32 {
        getpriority_process(None).unwrap()
    }

    #[test]
    fn only_the_work_and_its_threads_have_a_lower_priority() {
        let before = own_nice();
        let lower = (before + AWAITED).min(19);
        let inside = lowered(AWAITED, || (own_nice(), thread::spawn(own_nice).join()));
        assert_eq!(inside.0, lower);
        assert_eq!(inside.1.unwrap(), lower);
        assert_eq!(lowered(BACKGROUND, own_nice), (before + BACKGROUND).min(19));
        assert_eq!(lowered(0, own_nice), before);
        assert_eq!(own_nice(), before);
    }
}
