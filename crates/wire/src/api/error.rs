//! Errors.

use serde::{Deserialize, Serialize};

/// Body of every error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// Kind of error, for programs.
    pub kind: ErrorKind,
    /// One sentence: what is wrong and where.
    pub message: String,
    /// A hint for the user, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The queue is full, and the request should be sent again after this time: 1 to 60 seconds.
    /// The status is then 503, and the answer has the header `Retry-After`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_s: Option<u32>,
    /// The VM's first command could not be started: the exit status that a shell gives then, 127
    /// (not found), 126 (not executable) or 125.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<u8>,
}

impl ApiError {
    /// Its HTTP status.
    pub fn status(&self) -> u16 {
        match self.retry_after_s {
            Some(_) => 503,
            None => self.kind.status(),
        }
    }
}

/// Kind of error, which determines the HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// 400: the request is not valid.
    Invalid,
    /// 401: no token, or a wrong one.
    Unauthorized,
    /// 404: no such VM, image, kernel, volume, or path in a guest.
    NotFound,
    /// 409: the name is taken, or the thing is in use.
    Conflict,
    /// 409: the VM is not in the state for this.
    WrongState,
    /// 507: not enough memory, vCPUs or disk space; 503: the queue is full.
    NoRoom,
    /// 502: the VM, its VMM or its agent failed.
    VmFailed,
    /// 502: a registry failed or can't be reached.
    Registry,
    /// 500: the node failed.
    Internal,
}

impl ErrorKind {
    /// Its HTTP status.
    pub fn status(self) -> u16 {
        match self {
            ErrorKind::Invalid => 400,
            ErrorKind::Unauthorized => 401,
            ErrorKind::NotFound => 404,
            ErrorKind::Conflict | ErrorKind::WrongState => 409,
            ErrorKind::NoRoom => 507,
            ErrorKind::VmFailed | ErrorKind::Registry => 502,
            ErrorKind::Internal => 500,
        }
    }
}
