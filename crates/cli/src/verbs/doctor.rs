//! `jiffy doctor`

use super::Context;
use super::context::{show, show_json};
use crate::args::{Doctor, ListFormat};
use crate::cpu;
use crate::doctor::examine;
use crate::failure::{Outcome, Result};
use crate::place::find_running;
use jiffy_wire::api::NodeInfo;
use jiffy_wire::cpu::Profile;

/// `jiffy doctor`
pub fn doctor(context: &Context, doctor: Doctor) -> Result<Outcome> {
    if doctor.cpu {
        return context.block_on(|| processor(context, doctor.format));
    }
    let mut network = None;
    // Who can't be asked has nothing to say.
    let _ = context.block_on(|| async {
        if let Some(client) = find_running(context.machine, &context.folders)? {
            network = client.get::<NodeInfo>("/v1/info").await?.network;
        }
        Ok(Outcome::Done)
    });
    let report = examine(&context.folders, network.as_deref());
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
