//! What a balloon is created from, and what it keeps between activations.

use super::PAGE;
use super::reclaim::Reclaim;
use super::statistics::StatisticsBoard;
use jiffy_sys::log_limit::LogLimit;
use std::sync::Arc;

/// What a balloon is created from.
#[derive(Clone)]
pub struct BalloonArgs {
    /// Bytes of guest RAM, the largest size of the balloon.
    pub ram_bytes: u64,
    /// Releases the memory.
    pub reclaim: Arc<dyn Reclaim>,
}

/// The counters and callbacks that a balloon keeps across activations.
pub(super) struct Account {
    /// Bytes of guest RAM.
    pub(super) ram_bytes: u64,
    pub(super) reclaim: Arc<dyn Reclaim>,
    /// Bytes released when the driver inflated the balloon.
    pub(super) inflated_bytes: u64,
    /// Pages of those that the driver has not taken back.
    pub(super) given_pages: u64,
    /// Bytes released that the driver reported free.
    pub(super) reported_bytes: u64,
    pub(super) statistics: Arc<StatisticsBoard>,
    pub(super) log: LogLimit,
}

impl Account {
    /// The account of a new balloon.
    pub(super) fn new(args: BalloonArgs) -> Account {
        Account {
            ram_bytes: args.ram_bytes,
            reclaim: args.reclaim,
            inflated_bytes: 0,
            given_pages: 0,
            reported_bytes: 0,
            statistics: Arc::default(),
            log: LogLimit::new(),
        }
    }

    /// Pages of guest RAM.
    pub(super) fn ram_pages(&self) -> u64 {
        self.ram_bytes / PAGE
    }
}
