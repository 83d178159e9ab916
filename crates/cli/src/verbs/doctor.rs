//! `jiffy doctor`

use super::Context;
use super::context::{show, show_json};
use crate::args::{Doctor, ListFormat};
use crate::doctor::examine;
use crate::failure::{Outcome, Result};

/// `jiffy doctor`
pub fn doctor(context: &Context, doctor: Doctor) -> Result<Outcome> {
    let report = examine(&context.folders);
    match doctor.format {
        ListFormat::Json => show_json(&report)?,
        ListFormat::Table => show(&report.to_string())?,
    }
    Ok(Outcome::Verdict(report.verdict.exit_status()))
}
