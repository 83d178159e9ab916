//! Options of `jiffy ssh`, `ssh-config` and `ssh-proxy`.

use super::queue::WaitTime;
use clap::Args;

/// `jiffy ssh`
#[derive(Debug, Args)]
#[command(after_long_help = SSH_HELP)]
pub struct Ssh {
    /// Log in as this user of the image [default: root]
    #[arg(short = 'l', long, value_name = "USER")]
    pub user: Option<String>,
    /// Run the command on a terminal
    #[arg(short, long, conflicts_with = "no_tty")]
    pub tty: bool,
    /// Never use a terminal
    #[arg(short = 'T', long)]
    pub no_tty: bool,
    /// Forward a port of this host to one that the VM reaches. Repeatable
    #[arg(
        short = 'L',
        long,
        value_name = "[BIND:]PORT:HOST:HOSTPORT",
        allow_hyphen_values = true
    )]
    pub forward: Vec<String>,
    /// Run no command, to only forward ports
    #[arg(short = 'N', long)]
    pub no_command: bool,
    /// An option of ssh_config(5), such as ControlMaster=auto. Repeatable
    #[arg(short = 'o', long, value_name = "OPTION=VALUE")]
    pub option: Vec<String>,
    /// Connect to the VM's own SSH server, at its address
    #[arg(long)]
    pub address: bool,
    /// How long to wait if the VM is woken.
    #[command(flatten)]
    pub time: WaitTime,
    /// The VM: its name, its id or a unique prefix of its id
    #[arg(value_name = "[USER@]VM")]
    pub vm: String,
    /// The command, for the user's shell; without one, a login shell
    #[arg(trailing_var_arg = true, value_name = "CMD")]
    pub argv: Vec<String>,
}

const SSH_HELP: &str = "\
The image needs no SSH server: jiffy serves SSH itself and runs the commands \
like `jiffy exec`. Exit status: the command's own; 255 when ssh itself fails.";

/// `jiffy ssh-config`
#[derive(Debug, Args)]
#[command(after_long_help = SSH_CONFIG_HELP)]
pub struct SshConfig {
    /// Log in as this user of the image
    #[arg(short = 'l', long, value_name = "USER", default_value = "root")]
    pub user: String,
    /// VMs; without any, one block for the names NAME.jiffy of all VMs
    #[arg(value_name = "VM")]
    pub vms: Vec<String>,
}

const SSH_CONFIG_HELP: &str = "\
  jiffy ssh-config > ~/.ssh/jiffy
  sed -i '1i Include jiffy' ~/.ssh/config   # or write it there with an editor
  ssh web.jiffy; scp FILE web.jiffy:; rsync -a FOLDER web.jiffy:
  git clone web.jiffy:repository; code --remote ssh-remote+web.jiffy /root";

/// `jiffy ssh-proxy`
#[derive(Debug, Args)]
pub struct SshProxy {
    /// Print the VM's host key as a line of known_hosts for this host name instead
    #[arg(long, value_name = "HOST")]
    pub known_hosts: Option<String>,
    /// How long to wait if the VM is woken.
    #[command(flatten)]
    pub time: WaitTime,
    /// The VM: its name, its id or a unique prefix of its id, with or without .jiffy
    #[arg(value_name = "VM")]
    pub vm: String,
}
