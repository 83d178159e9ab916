//! Reservations for background work, which requests may take away.

use super::amount::Amount;
use super::{Reserved, Room};
use crate::error::Error;
use std::sync::Arc;
use tokio::sync::watch;

/// Memory reserved by background work.
#[derive(Debug)]
pub struct Background {
    _reserved: Reserved,
    claims: watch::Receiver<u64>,
    /// The value of `claims` before the reservation.
    before: u64,
}

impl Room {
    /// Reserves for background work, if there is room now and no request waits. Requests may take
    /// this memory away ([`Background::claimed`]).
    pub fn reserve_background(self: &Arc<Self>, amount: Amount) -> Option<Background> {
        let mut state = self.state();
        if state.is_low || !state.line.is_empty() {
            return None;
        }
        // Subscribed before the check, so that no claim is missed.
        let claims = self.claims.subscribe();
        let before = *claims.borrow();
        let others = state.totals.background;
        if !self.shortage(&state, amount, 1).fits_with(others) {
            return None;
        }
        state.totals.background = others.plus(amount);
        drop(state);
        Some(Background {
            _reserved: self.reserved(amount, 1, true),
            before,
            claims,
        })
    }
}

impl Background {
    /// Waits until a request has claimed this memory: the background work must be given up.
    pub async fn claimed(&mut self) {
        // The sender is the ledger's, which this holds.
        let _ = self.claims.wait_for(|claims| *claims > self.before).await;
    }

    /// Whether a request has claimed this memory.
    pub fn was_claimed(&self) -> bool {
        *self.claims.borrow() > self.before
    }
}

/// The error of background work that has no room, or whose memory was claimed.
pub fn memory_needed() -> Error {
    Error::no_room("Running VMs need the memory.")
}
