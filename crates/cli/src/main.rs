//! jiffy: the command line.

fn main() -> ! {
    jiffy_cli::main()
}
