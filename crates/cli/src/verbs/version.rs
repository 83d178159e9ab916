//! `jiffy version`

use super::Context;
use super::context::{show, show_json};
use crate::args::{ListFormat, Version};
use crate::failure::{Outcome, Result};
use crate::place;
use jiffy_wire::api::{self, NodeInfo};
use serde_json::json;

/// `jiffy version`
///
/// # Errors
///
/// If stdout can't be written. A node that can't be reached is only reported.
pub async fn version(context: &Context, version: Version) -> Result<Outcome> {
    let own = env!("CARGO_PKG_VERSION");
    // A node that can't be reached must not hide the client's version.
    let node: Option<NodeInfo> = match place::find_running(context.machine, &context.folders) {
        Ok(Some(client)) => match client.get("/v1/info").await {
            Ok(info) => Some(info),
            Err(failure) => {
                failure.report();
                None
            }
        },
        Ok(None) => None,
        Err(failure) => {
            failure.report();
            None
        }
    };
    match version.format {
        ListFormat::Json => show_json(&json!({
            "version": own,
            "api": api::VERSION,
            "node": node,
        }))?,
        ListFormat::Table => {
            let node = match node {
                Some(node) => format!("{} (API {}, {})", node.version, node.api, node.data),
                None => "does not run".to_owned(),
            };
            show(&format!(
                "jiffy   {own} (API {})\njiffyd  {}\n",
                api::VERSION,
                crate::render::harmless(&node)
            ))?;
        }
    }
    Ok(Outcome::Done)
}
