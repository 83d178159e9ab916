//! `jiffy doctor`

use super::Context;
use super::context::{show, show_json};
use crate::args::{Doctor, ListFormat};
use crate::cpu;
use crate::doctor::{Reported, examine};
use crate::failure::{Outcome, Result};
use crate::place::find_running;
use jiffy_wire::api::NodeInfo;
use jiffy_wire::cpu::Profile;

/// `jiffy doctor`
///
/// # Errors
///
/// If stdout can't be written; with `--cpu`, also if there is no node.
pub fn doctor(context: &Context, doctor: Doctor) -> Result<Outcome> {
    if doctor.cpu {
        return context.block_on(|| processor(context, doctor.format));
    }
    let mut node = Reported::default();
    // A node that can't be reached has no report, and one of 0.1.0 has no networks.
    let _ = context.block_on(|| async {
        if let Some(client) = find_running(context.machine, &context.folders)? {
            node.containment = client.get::<NodeInfo>("/v1/info").await?.containment;
            node.network = Some(client.get("/v1/networks/default").await?);
        }
        Ok(Outcome::Done)
    });
    let report = examine(&context.folders, &node);
    match doctor.format {
        ListFormat::Json => show_json(&report)?,
        ListFormat::Table => show(&report.to_string())?,
    }
    Ok(Outcome::Verdict(report.verdict.exit_status()))
}

/// The processor of the node, which may be in the machine.
async fn processor(context: &Context, format: ListFormat) -> Result<Outcome> {
    let host: Profile = context.client()?.get("/v1/cpu").await?;
    match format {
        ListFormat::Json => show_json(&host)?,
        ListFormat::Table => show(&cpu::table(&host))?,
    }
    Ok(Outcome::Done)
}
