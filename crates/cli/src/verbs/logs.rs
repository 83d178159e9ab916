//! `jiffy logs`

use super::Context;
use crate::args::Logs;
use crate::client::{FrameReader, vm_path};
use crate::failure::{Failure, Outcome, Result};
use jiffy_wire::agent::Stream;
use jiffy_wire::api::LogChunk;
use std::io::Write;

/// `jiffy logs`
///
/// # Errors
///
/// If there is no node, it refuses, the connection is lost, or the log can't be written to stdout.
pub async fn logs(context: &Context, logs: Logs) -> Result<Outcome> {
    let source = match (logs.console, logs.vmm) {
        (true, _) => "console",
        (_, true) => "vmm",
        _ => "command",
    };
    let mut query = format!("/logs?follow={}&source={source}", logs.follow);
    if let Some(lines) = logs.tail {
        query.push_str(&format!("&tail={lines}"));
    }
    let body = context.client()?.stream(&vm_path(&logs.vm, &query)).await?;
    let mut chunks = FrameReader::of_body(body);
    while let Some(chunk) = chunks.next::<LogChunk>().await? {
        let written = match chunk.stream {
            Stream::Stdout => {
                let mut stdout = std::io::stdout().lock();
                stdout.write_all(&chunk.data).and_then(|()| stdout.flush())
            }
            Stream::Stderr => std::io::stderr().write_all(&chunk.data),
        };
        written.map_err(|error| Failure::io("the log can't be written", error))?;
    }
    Ok(Outcome::Done)
}
