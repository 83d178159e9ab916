//! An authenticated client.

use super::backlog::Backlog;
use super::guest::Guest;
use std::sync::Arc;

/// State shared by the channels of a connection.
#[derive(Clone)]
pub struct Login {
    /// The VM.
    pub guest: Arc<Guest>,
    /// The user as whom programs run.
    pub user: Arc<str>,
    /// Data that programs have not read.
    pub backlog: Arc<Backlog>,
}
