//! `jiffy events`

use super::Context;
use super::context::show;
use crate::args::ListFormat;
use crate::args::events::Events;
use crate::client::{JsonLines, encoded};
use crate::failure::{Failure, Kind, Outcome, Result};
use crate::render::{harmless, harmless_json};
use jiffy_wire::agent::ExitStatus;
use jiffy_wire::api::{Action, Event};

/// `jiffy events`
///
/// # Errors
///
/// If there is no node, stdout can't be written, or the connection ends before the VM is removed.
pub async fn events(context: &Context, events: Events) -> Result<Outcome> {
    let query = events.vm.as_deref().map(encoded);
    let query = query.map_or_else(String::new, |vm| format!("?vm={vm}"));
    let body = context
        .client()?
        .stream(&format!("/v1/events{query}"))
        .await?;
    let mut lines = JsonLines::new(body);
    let mut removed = false;
    while let Some(event) = lines.next::<Event>().await? {
        removed = event.action == Action::Removed;
        match events.format {
            ListFormat::Json => show(&json_line(&event)?)?,
            ListFormat::Table => show(&line(&event))?,
        }
    }
    if events.vm.is_some() && removed {
        return Ok(Outcome::Done);
    }
    Err(Failure::new("the connection to jiffyd was lost").kind(Kind::Unreachable))
}

fn json_line(event: &Event) -> Result<String> {
    let text = serde_json::to_string(event)
        .map_err(|error| Failure::new(format!("the event can't be written as JSON: {error}")))?;
    Ok(harmless_json(text + "\n"))
}

/// An event as one line of text.
fn line(event: &Event) -> String {
    let mut line = format!(
        "{}  {:8}  {:10}  {}",
        utc(event.time_ms),
        event.subject.name(),
        event.action.name(),
        harmless(&event.name)
    );
    if let Some(id) = &event.id {
        line.push_str(&format!("  {}", harmless(id)));
    }
    match event.exit {
        Some(ExitStatus::Code(code)) => line.push_str(&format!("  status {code}")),
        Some(ExitStatus::Signal(signal)) => line.push_str(&format!("  signal {signal}")),
        None => {}
    }
    if let Some(detail) = &event.detail {
        line.push_str(&format!("  {}", harmless(detail)));
    }
    line.push('\n');
    line
}

/// Unix milliseconds as in RFC 3339, in UTC.
fn utc(time_ms: u64) -> String {
    let time = i64::try_from(time_ms).ok();
    let time = time.and_then(|time| jiff::Timestamp::from_millisecond(time).ok());
    time.map_or_else(|| time_ms.to_string(), |time| format!("{time:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use jiffy_wire::api::Subject;

    #[test]
    fn an_event_is_one_line() {
        let mut event = Event {
            time_ms: 1_795_658_400_045,
            subject: Subject::Vm,
            action: Action::Exited,
            id: Some("0123456789ab".into()),
            name: "web".into(),
            exit: Some(ExitStatus::Code(3)),
            detail: Some("The VMM\nended.\u{9b}".into()),
        };
        assert_eq!(
            line(&event),
            "2026-11-26T02:00:00.045Z  vm        exited      web  0123456789ab  status 3  The VMM\u{fffd}ended.\u{fffd}\n"
        );
        event.time_ms = u64::MAX;
        assert!(line(&event).starts_with("18446744073709551615  vm "));
        let json = json_line(&event).unwrap();
        assert_eq!(json.matches('\n').count(), 1);
        assert!(json.contains(r"ended.\u009b"), "{json}");
    }
}
