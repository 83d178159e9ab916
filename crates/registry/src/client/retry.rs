//! Retries after temporary failures.

use super::options::Retries;
use crate::error::Result;
use crate::{Progress, RegistryError};
use jiffy_sys::causes;
use std::time::{Duration, Instant};

/// How often a wait checks for cancellation.
const CANCEL_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The retries of one operation.
pub(super) struct Retrier<'a> {
    retries: &'a Retries,
    what: &'a str,
    progress: &'a dyn Progress,
    failures: u32,
}

impl<'a> Retrier<'a> {
    pub(super) fn new(retries: &'a Retries, what: &'a str, progress: &'a dyn Progress) -> Self {
        Self {
            retries,
            what,
            progress,
            failures: 0,
        }
    }

    /// Repeats an attempt until it succeeds, fails permanently, or has failed too often.
    pub(super) fn run<T>(&mut self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        loop {
            match attempt() {
                Ok(done) => return Ok(done),
                Err(error) => self.wait_or_fail(error)?,
            }
        }
    }

    /// Resets the count of failures after progress.
    pub(super) fn reset(&mut self) {
        self.failures = 0;
    }

    /// Waits before the next attempt, or returns the error if there is none left.
    pub(super) fn wait_or_fail(&mut self, error: RegistryError) -> Result<()> {
        self.check()?;
        if !error.is_transient() || self.failures >= self.retries.limit {
            return Err(error);
        }
        self.failures += 1;
        let wait = wait_before(self.retries, self.failures, &error);
        let deadline = self.progress.deadline();
        if deadline.is_some_and(|deadline| Instant::now() + wait >= deadline) {
            return Err(error);
        }
        let why = causes::sentence(&error);
        tracing::debug!(what = self.what, failures = self.failures, ?wait, "{why}");
        self.progress.retrying(&why, wait);
        self.sleep(wait)
    }

    /// An error if the operation was cancelled.
    pub(super) fn check(&self) -> Result<()> {
        if self.progress.cancelled() {
            return Err(RegistryError::Cancelled {
                what: self.what.to_owned(),
            });
        }
        Ok(())
    }

    fn sleep(&self, wait: Duration) -> Result<()> {
        if let Some(sleep) = &self.retries.sleep {
            sleep(wait);
            return self.check();
        }
        let mut left = wait;
        while !left.is_zero() {
            let slice = left.min(CANCEL_CHECK_INTERVAL);
            std::thread::sleep(slice);
            left -= slice;
            self.check()?;
        }
        Ok(())
    }
}

/// The wait that the registry asked for; otherwise random between half and all of a time that
/// doubles, so that many clients do not retry at once.
fn wait_before(retries: &Retries, attempt: u32, error: &RegistryError) -> Duration {
    if let RegistryError::Refused {
        retry_after: Some(asked),
        ..
    } = error
    {
        return (*asked).min(retries.longest_wait);
    }
    let doublings = (attempt - 1).min(16);
    let all = retries
        .first_wait
        .saturating_mul(1 << doublings)
        .min(retries.longest_wait);
    all.mul_f64(0.5 + fastrand::f64() / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    fn refused(status: u16, retry_after: Option<Duration>) -> RegistryError {
        RegistryError::Refused {
            what: "x".into(),
            host: "h".into(),
            status,
            detail: String::new(),
            retry_after,
        }
    }

    fn waits(limit: u32, error: impl Fn() -> RegistryError) -> Vec<Duration> {
        let slept = Arc::new(Mutex::new(Vec::new()));
        let into = Arc::clone(&slept);
        let retries = Retries {
            limit,
            sleep: Some(Arc::new(move |wait| into.lock().unwrap().push(wait))),
            ..Retries::default()
        };
        let result: Result<()> = Retrier::new(&retries, "x", &()).run(|| Err(error()));
        result.unwrap_err();
        let slept = slept.lock().unwrap();
        slept.clone()
    }

    #[test]
    fn waits_double_and_are_bounded() {
        let slept = waits(12, || refused(503, None));
        assert_eq!(slept.len(), 12);
        for (n, wait) in slept.iter().enumerate() {
            let all = Duration::from_millis(250 << n).min(Duration::from_secs(30));
            assert!((all / 2..=all).contains(wait), "retry {n} waited {wait:?}");
        }
    }

    #[test]
    fn a_registry_says_how_long_to_wait() {
        let asked = |seconds| waits(1, || refused(429, Some(Duration::from_secs(seconds))));
        assert_eq!(asked(7), [Duration::from_secs(7)]);
        assert_eq!(asked(86_400), [Duration::from_secs(30)]);
    }

    #[test]
    fn permanent_failures_are_not_retried() {
        assert!(waits(5, || refused(400, None)).is_empty());
        assert!(waits(5, || RegistryError::NotFound { what: "x".into() }).is_empty());
    }

    #[test]
    fn a_request_is_not_retried_past_its_deadline() {
        struct Until(Instant);
        impl Progress for Until {
            fn deadline(&self) -> Option<Instant> {
                Some(self.0)
            }
        }
        let attempts = |deadline| {
            let retries = Retries {
                sleep: Some(Arc::new(|_| ())),
                ..Retries::default()
            };
            let mut attempts = 0;
            let result: Result<()> = Retrier::new(&retries, "x", &Until(deadline)).run(|| {
                attempts += 1;
                Err(refused(503, None))
            });
            result.unwrap_err();
            attempts
        };
        assert_eq!(attempts(Instant::now()), 1);
        assert_eq!(attempts(Instant::now() + Duration::from_secs(86_400)), 6);
    }

    #[test]
    fn a_cancelled_request_does_not_wait() {
        struct GivenUp;
        impl Progress for GivenUp {
            fn cancelled(&self) -> bool {
                true
            }
        }
        let result: Result<()> =
            Retrier::new(&Retries::default(), "x", &GivenUp).run(|| Err(refused(503, None)));
        assert!(matches!(result, Err(RegistryError::Cancelled { .. })));
    }
}
