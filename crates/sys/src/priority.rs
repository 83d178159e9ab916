//! Which thread comes first where several want a processor.
#![allow(unsafe_code)] // sched_setscheduler

use std::io;

/// From now on this thread runs only where no other wants to, and makes room at once
/// for one that wakes (`SCHED_IDLE`, sched(7)). A low nice value is not enough for
/// that: such a thread still ends its turn, which takes milliseconds.
///
/// It gets little where others always have something to do, so it should hold nothing
/// for which they wait.
pub fn give_way() -> io::Result<()> {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the kernel copies the parameters.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &parameters) } {
        0 => {
            // Others may have waited before it gave way.
            std::thread::yield_now();
            Ok(())
        }
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_gives_way_and_the_others_do_not() {
        // SAFETY: asks about the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        let other = std::thread::spawn(move || {
            give_way().unwrap();
            policy()
        });
        assert_eq!(other.join().unwrap(), libc::SCHED_IDLE);
        assert_eq!(policy(), before);
    }
}
