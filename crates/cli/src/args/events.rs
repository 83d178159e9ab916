//! Arguments of `jiffy events`.

use super::ListFormat;
use clap::Args;

/// `jiffy events`
#[derive(Debug, Args)]
#[command(
    after_long_help = "Prints what happens from now on, until it is interrupted. With a VM \
it ends when that VM was removed. If this command is too slow, a line says how many events are missing."
)]
pub struct Events {
    /// Output format; json prints one object on each line
    #[arg(long, value_enum, default_value = "table")]
    pub format: ListFormat,
    /// Only events of this VM: a name, an id or a unique prefix of an id
    #[arg(value_name = "VM")]
    pub vm: Option<String>,
}
