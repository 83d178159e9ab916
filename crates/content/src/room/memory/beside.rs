//! Reservations for captures. A capture needs some memory for a short time and no vCPUs, and may be
//! part of what makes room for the queue: a hibernation, for example. So it does not wait in the
//! queue, and has no place in it.

use super::amount::Amount;
use super::shortage::Shortage;
use super::{LOOK, Reserved, Room};
use crate::clock::monotonic_ns;
use crate::error::Result;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::debug;

impl Room {
    /// Reserves for a capture: at once if it fits, whatever waits in the queue. Otherwise it waits
    /// for so long, but no longer than a request does that does not say so.
    pub async fn reserve_beside(
        self: &Arc<Self>,
        want: Amount,
        wait: Option<Duration>,
    ) -> Result<Reserved> {
        let wait = wait.map_or(self.wait, |wait| wait.min(self.wait));
        let shortage = match self.try_beside(want) {
            Ok(reserved) => return Ok(reserved),
            Err(shortage) => shortage,
        };
        if shortage.is_for_good() || wait.is_zero() {
            return Err(shortage.error(None));
        }
        debug!(?shortage, "a capture waits for memory");
        let began_ns = monotonic_ns();
        let fits = timeout_at(Instant::now() + wait, self.when_it_fits_beside(want));
        match fits.await {
            Ok(mut reserved) => {
                reserved.waited_ns = Some((began_ns, monotonic_ns()));
                Ok(reserved)
            }
            Err(_) => {
                let last = self.try_beside(want);
                last.map_err(|shortage| shortage.error(Some(wait)))
            }
        }
    }

    async fn when_it_fits_beside(self: &Arc<Self>, want: Amount) -> Reserved {
        loop {
            let mut freed = pin!(self.freed.notified());
            // Enabled before the look, so that nothing given back after it is missed.
            freed.as_mut().enable();
            if let Ok(reserved) = self.try_beside(want) {
                return reserved;
            }
            // Other programs give memory back, too.
            let _ = timeout(LOOK, freed).await;
        }
    }

    fn try_beside(self: &Arc<Self>, want: Amount) -> std::result::Result<Reserved, Shortage> {
        let mut state = self.state();
        let shortage = self.shortage(&state, want, 1);
        match shortage.fits() {
            true => Ok(self.take(&mut state, &shortage)),
            false => Err(shortage),
        }
    }
}
