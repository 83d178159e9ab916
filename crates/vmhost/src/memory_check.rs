//! Whether the saved memory of a hibernated VM can be used.
//!
//! A daemon may start with thousands of hibernated VMs, so it does not look at their files before it
//! answers. Each is checked when it is shown, or in the background; a wake reads it in any case.

use jiffy_sys::mutex::lock;
use std::sync::{Mutex, MutexGuard};

/// What is known of the saved memory of a VM.
#[derive(Debug)]
pub struct MemoryCheck(Mutex<Known>);

#[derive(Debug)]
struct Known {
    /// The result of the last check, if there was one.
    checked: Option<Problem>,
    /// How often [`MemoryCheck::mark_good`] was called.
    generation: u64,
}

/// Why it can't be used, in one sentence; `None` if it can.
type Problem = Option<Box<str>>;

impl MemoryCheck {
    /// It is known to be good, or there is none.
    pub fn good() -> MemoryCheck {
        MemoryCheck::new(Some(None))
    }

    /// An earlier daemon saved it.
    pub fn unchecked() -> MemoryCheck {
        MemoryCheck::new(None)
    }

    fn new(checked: Option<Problem>) -> MemoryCheck {
        MemoryCheck(Mutex::new(Known {
            checked,
            generation: 0,
        }))
    }

    /// Was it checked, or saved by this daemon?
    pub fn is_done(&self) -> bool {
        self.lock().checked.is_some()
    }

    /// Checks it, if that was not done; returns a problem that this check has found. `look` may block.
    pub fn run(&self, look: impl FnOnce() -> Result<(), String>) -> Option<String> {
        let generation = {
            let known = self.lock();
            if known.checked.is_some() {
                return None;
            }
            known.generation
        };
        let problem = look().err();
        let mut known = self.lock();
        // What was found may be of files of an earlier hibernation.
        if known.generation != generation || known.checked.is_some() {
            return None;
        }
        known.checked = Some(problem.as_deref().map(Into::into));
        problem
    }

    /// The problem, if one was found.
    pub fn problem(&self) -> Option<String> {
        let known = self.lock();
        known.checked.as_ref()?.as_deref().map(str::to_owned)
    }

    /// The memory is saved anew, or was read without a problem.
    pub fn mark_good(&self) {
        let mut known = self.lock();
        known.checked = Some(None);
        known.generation += 1;
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;

    #[test]
    fn memory_is_checked_once_until_it_is_saved_anew() {
        let check = MemoryCheck::unchecked();
        assert!(!check.is_done());
        assert_eq!(check.problem(), None);
        let bad = || Err("It is gone.".to_owned());
        assert_eq!(check.run(bad).as_deref(), Some("It is gone."));
        assert!(check.is_done());
        assert_eq!(check.run(|| panic!("again")), None);
        assert_eq!(check.problem().as_deref(), Some("It is gone."));
        check.mark_good();
        assert!(check.is_done());
        assert_eq!(check.problem(), None);
        assert!(MemoryCheck::good().is_done());
    }

    #[test]
    fn a_check_that_is_overtaken_by_a_hibernation_finds_nothing() {
        let check = MemoryCheck::unchecked();
        let (begun, has_begun) = mpsc::channel();
        let (saves, is_saving) = mpsc::channel();
        let found = thread::scope(|scope| {
            let check = &check;
            let overtaken = scope.spawn(move || {
                check.run(|| {
                    begun.send(()).unwrap();
                    is_saving.recv().unwrap();
                    Err("The files of the earlier hibernation are gone.".into())
                })
            });
            has_begun.recv().unwrap();
            check.mark_good();
            saves.send(()).unwrap();
            overtaken.join().unwrap()
        });
        assert_eq!(found, None);
        assert_eq!(check.problem(), None);
    }
}
