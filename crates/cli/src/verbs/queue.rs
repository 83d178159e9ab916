//! `jiffy queue`

use super::Context;
use super::context::{show, show_json};
use crate::args::ListFormat;
use crate::args::queue::Queue;
use crate::failure::{Outcome, Result};
use crate::render::{Table, age, now, size};
use jiffy_wire::api::Queued;

/// `jiffy queue`
///
/// # Errors
///
/// If there is no node, or stdout can't be written.
pub async fn queue(context: &Context, queue: Queue) -> Result<Outcome> {
    let waiting: Vec<Queued> = context.client()?.get("/v1/queue").await?;
    match queue.format {
        ListFormat::Json => show_json(&waiting)?,
        ListFormat::Table => show(&table(&waiting, now()))?,
    }
    Ok(Outcome::Done)
}

fn table(waiting: &[Queued], now: u64) -> String {
    let mut table = Table::new([
        "PLACE", "ID", "NAME", "FOR", "OWNER", "PRIORITY", "VMS", "MEMORY", "VCPUS", "WAITED",
        "LEFT",
    ]);
    for one in waiting {
        table.row([
            one.place.to_string(),
            one.id.clone(),
            one.name.clone(),
            one.purpose.name().to_owned(),
            one.owner.clone(),
            one.priority.name().to_owned(),
            one.vms.to_string(),
            size(one.memory_mib.saturating_mul(1 << 20)),
            one.cpus.to_string(),
            age(one.since, now),
            format!("{} s", one.until.saturating_sub(now)),
        ]);
    }
    table.to_string()
}
