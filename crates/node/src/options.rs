//! The daemon's command line.

use clap::Parser;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The Jiffy node: keeps images and VMs, and serves the API.
#[derive(Debug, Clone, Parser)]
#[command(name = "jiffyd", version, about)]
pub struct Options {
    /// What must survive: images, volumes, VMs' records and logs.
    #[arg(long, value_name = "DIR", env = "JIFFY_DATA")]
    pub data: Option<PathBuf>,
    /// Sockets.
    #[arg(long, value_name = "DIR", env = "JIFFY_RUN")]
    pub run: Option<PathBuf>,
    /// Where jiffy-vmm is.
    #[arg(long, value_name = "DIR", env = "JIFFY_LIB")]
    pub lib: Option<PathBuf>,
    /// Where kernels, the initramfs and the base image are.
    #[arg(long, value_name = "DIR", env = "JIFFY_SHARE")]
    pub share: Option<PathBuf>,
    /// The API's Unix socket (default: jiffyd.sock in the run folder).
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Listen here too; needs --token-file.
    #[arg(long, value_name = "tcp:ADDR:PORT")]
    pub listen: Option<TcpAddress>,
    /// A file with the token that every request over TCP must carry.
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Write one byte to this inherited descriptor once the API listens.
    #[arg(long, value_name = "N", hide = true)]
    pub ready_fd: Option<u32>,
    /// The registry of images whose name has none, like localhost:5000.
    #[arg(long, value_name = "HOST", env = "JIFFY_REGISTRY")]
    pub registry: Option<String>,
    /// A folder with images of chunks (ID.jimg) that is looked into before a
    /// registry: another node's `chunks`, say.
    #[arg(long, value_name = "DIR", env = "JIFFY_PEER")]
    pub peer: Option<PathBuf>,
    /// Seconds a guest has to get ready.
    #[arg(
        long,
        value_name = "SECONDS",
        env = "JIFFY_START_TIMEOUT",
        default_value_t = 60,
        value_parser = clap::value_parser!(u32).range(1..=86_400)
    )]
    pub start_timeout: u32,
    /// How many VMs to keep restored ahead of runs, each of another kind; 0
    /// for none. One takes some 5 MiB.
    #[arg(
        long,
        value_name = "COUNT",
        env = "JIFFY_STANDBY",
        default_value_t = 2,
        value_parser = clap::value_parser!(u32).range(..=1000)
    )]
    pub standby: u32,
}

/// `tcp:ADDR:PORT`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpAddress(pub SocketAddr);

impl FromStr for TcpAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<TcpAddress, String> {
        text.strip_prefix("tcp:")
            .and_then(|address| address.parse().ok())
            .map(TcpAddress)
            .ok_or_else(|| "expected tcp:ADDRESS:PORT, like tcp:127.0.0.1:7070".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_its_prefix_and_its_port() {
        assert!("tcp:127.0.0.1:80".parse::<TcpAddress>().is_ok());
        assert!("tcp:[::1]:80".parse::<TcpAddress>().is_ok());
        for wrong in ["127.0.0.1:80", "tcp:127.0.0.1", "tcp:localhost:80", ""] {
            assert!(wrong.parse::<TcpAddress>().is_err(), "{wrong}");
        }
    }
}
