//! `jiffy timeline`, and `--timeline` of `jiffy run`.

use super::Context;
use super::context::{show, show_json};
use crate::args::{self, TimelineFormat, TimelineOrder, TimelineOutput};
use crate::client::vm_path;
use crate::failure::{Failure, Outcome, Result};
use crate::render::harmless_json;
use crate::timeline::{Look, activity, blame, critical_chain, json, perfetto, table};
use jiffy_wire::timeline::Timeline;
use rustix::termios::{isatty, tcgetwinsize};
use std::io::Write;
use std::os::fd::BorrowedFd;

/// Width in columns if neither the terminal nor `COLUMNS` gives one.
const DEFAULT_WIDTH: usize = 100;

/// `jiffy timeline`
///
/// # Errors
///
/// If no VM is given, there is no node, it has no such VM, or stdout can't be written.
pub async fn timeline(context: &Context, timeline: args::Timeline) -> Result<Outcome> {
    let (vm, order) = match (&timeline.order, &timeline.vm) {
        (Some(TimelineOrder::Blame { vm }), _) => (vm, Some(blame as fn(&Timeline) -> String)),
        (Some(TimelineOrder::CriticalChain { vm }), _) => (vm, Some(critical_chain as _)),
        (None, Some(vm)) => (vm, None),
        (None, None) => return Err(Failure::new("no VM is given")),
    };
    let spans: Timeline = context.client()?.get(&vm_path(vm, "/timeline")).await?;
    match (order, timeline.format) {
        (Some(order), _) => show(&order(&spans))?,
        (None, TimelineFormat::Table) => {
            let table = table(&spans, look(rustix::stdio::stdout()));
            show(&(table + &activity(&spans)))?;
        }
        (None, TimelineFormat::Json) => show_json(&json(&spans))?,
        (None, TimelineFormat::Perfetto) => show_json(&perfetto(&spans))?,
    }
    Ok(Outcome::Done)
}

/// Writes a timeline to stderr or to a file, after the command's own output.
///
/// # Errors
///
/// If the file can't be written.
pub fn write(timeline: &Timeline, output: &TimelineOutput) -> Result<()> {
    let look = match output.file {
        Some(_) => Look {
            width: DEFAULT_WIDTH,
            colour: false,
        },
        None => look(rustix::stdio::stderr()),
    };
    let text = match output.format {
        TimelineFormat::Table => table(timeline, look) + &activity(timeline),
        TimelineFormat::Json => harmless_json(format!("{:#}\n", json(timeline))),
        TimelineFormat::Perfetto => harmless_json(format!("{:#}\n", perfetto(timeline))),
    };
    match &output.file {
        Some(file) => std::fs::write(file, text).map_err(|error| {
            Failure::io(
                format_args!("the timeline can't be written to {}", file.display()),
                error,
            )
        }),
        // Without stderr it can't be shown.
        None => {
            let _ = std::io::stderr().write_all(text.as_bytes());
            Ok(())
        }
    }
}

/// Width and colours of the terminal on `fd`.
fn look(fd: BorrowedFd<'_>) -> Look {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let width = tcgetwinsize(fd)
        .ok()
        .map(|size| usize::from(size.ws_col))
        .filter(|width| *width > 0)
        .or_else(|| variable("COLUMNS")?.parse().ok())
        .unwrap_or(DEFAULT_WIDTH);
    Look {
        width,
        colour: isatty(fd)
            && variable("NO_COLOR").is_none()
            && variable("TERM").as_deref() != Some("dumb"),
    }
}
