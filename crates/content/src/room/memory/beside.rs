//! Reservations for captures. A capture needs some memory for a short time and no vCPUs. It may
//! free memory for the queue, as a hibernation does, so it does not wait in the queue.

use super::amount::Amount;
use super::shortage::Shortage;
use super::{CHECK_INTERVAL, Reserved, Room};
use crate::clock::monotonic_ns;
use crate::error::Result;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

impl Room {
    /// Reserves for a capture: at once if it fits, regardless of the queue. Otherwise waits up to
    /// `wait`, but no longer than the default time limit of requests.
    ///
    /// # Errors
    ///
    /// If it can never fit, or did not within the time limit.
    pub async fn reserve_for_capture(
        self: &Arc<Self>,
        want: Amount,
        wait: Option<Duration>,
    ) -> Result<Reserved> {
        let wait = wait.map_or(self.wait, |wait| wait.min(self.wait));
        let shortage = match self.try_for_capture(want) {
            Ok(reserved) => return Ok(reserved),
            Err(shortage) => shortage,
        };
        if shortage.is_permanent() || wait.is_zero() {
            return Err(shortage.error(None));
        }
        debug!(?shortage, "a capture waits for memory");
        let began_ns = monotonic_ns();
        let fits = timeout_at(Instant::now() + wait, self.wait_for_capture(want));
        match fits.await {
            Ok(mut reserved) => {
                reserved.waited_ns = Some((began_ns, monotonic_ns()));
                Ok(reserved)
            }
            Err(_) => {
                let last = self.try_for_capture(want);
                last.map_err(|shortage| shortage.error(Some(wait)))
            }
        }
    }

    async fn wait_for_capture(self: &Arc<Self>, want: Amount) -> Reserved {
        loop {
            let mut freed = pin!(self.freed.notified());
            // Enabled before the check, so that nothing given back later is missed.
            freed.as_mut().enable();
            if let Ok(reserved) = self.try_for_capture(want) {
                return reserved;
            }
            // Other programs free memory, too.
            let _ = timeout(CHECK_INTERVAL, freed).await;
        }
    }

    fn try_for_capture(self: &Arc<Self>, want: Amount) -> std::result::Result<Reserved, Shortage> {
        let mut state = self.state();
        let shortage = self.shortage(&state, want, 1);
        match shortage.fits() {
            true => Ok(self.take(&mut state, &shortage)),
            false => Err(shortage),
        }
    }
}
