//! Entry points for fuzzing: what clients and VMMs send, and what `jiffy-origins` answers.

pub use crate::origins::testing::{answer, helper_request};
pub use crate::server::testing::{Opening, control_requests, disk_requests, handshake, written};
