//! `jiffy-ssh`: the SSH verbs of `jiffy`.

use jiffy_cli::SshVerb;
use jiffy_ssh::{client, config, proxy};

fn main() -> ! {
    jiffy_cli::ssh_main(|context, verb| match verb {
        SshVerb::Ssh(ssh) => context.block_on(|| client::ssh(context, ssh)),
        SshVerb::Config(options) => context.block_on(|| config::print(context, options)),
        SshVerb::Proxy(mut options) => match options.known_hosts.take() {
            Some(host) => context.block_on(|| proxy::known_hosts(context, options, host)),
            None => context.block_on(|| proxy::serve(context, options)),
        },
    })
}
