//! jiffy-ssh: the verbs of SSH.

use jiffy_cli::SshVerb;
use jiffy_ssh::{client, config, proxy};

fn main() -> ! {
    jiffy_cli::ssh_main(|context, verb| match verb {
        SshVerb::Ssh(ssh) => context.block_on(|| client::ssh(context, ssh)),
        SshVerb::Config(options) => context.block_on(|| config::print(context, options)),
        SshVerb::Proxy(options) if options.known_hosts => {
            context.block_on(|| proxy::known_hosts(context, options))
        }
        SshVerb::Proxy(options) => context.block_on(|| proxy::serve(context, options)),
    })
}
