//! `jiffy sched`

use super::context::show;
use super::{Context, output_file};
use crate::args::sched::Sched;
use crate::failure::{Failure, Outcome, Result, report};
use crate::timeline::sched_events;
use jiffy_wire::api::SchedTrace;
use std::pin::pin;
use tokio::signal::unix::{SignalKind, signal};

const PATH: &str = "/v1/sched/trace";
/// What is written, in an error.
const WHAT: &str = "the recording";

/// `jiffy sched`
///
/// # Errors
///
/// If there is no node, it refuses, or the recording can't be written.
pub async fn sched(context: &Context, sched: Sched) -> Result<Outcome> {
    let Sched::Trace { output, seconds } = sched;
    if let Some(file) = &output {
        output_file::check(WHAT, file)?;
    }
    let path = format!("{PATH}?seconds={seconds}");
    let client = context.client()?;
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| Failure::io("signals can't be received", error))?;
    let mut recorded = pin!(client.post::<SchedTrace>(&path));
    let trace = loop {
        tokio::select! {
            trace = &mut recorded => break trace?,
            _ = interrupts.recv() => client.delete(PATH).await?,
        }
    };
    let text = sched_events(&trace);
    match &output {
        None => show(&text)?,
        Some(file) => output_file::write(WHAT, file, text.as_bytes())?,
    }
    if trace.lost > 0 {
        let lost = trace.lost;
        report(
            &format!("the recording ends early: {lost} events were lost when buffers were full"),
            Some("record for fewer seconds"),
        );
    }
    Ok(Outcome::Done)
}
