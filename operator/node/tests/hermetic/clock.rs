//! An API server with a certificate that is not valid at this machine's time, as where a clock is wrong.
//!
//! `clock/` has a key and two self-signed certificates of 127.0.0.1: `expired.pem` (2020) and `early.pem` (2090), made
//! by `openssl ca -selfsign -startdate … -enddate …`.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::thread;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection};

use super::{Running, agent, failed, kubeconfig, plugin, until};

const KEY: &[u8] = include_bytes!("clock/key.pem");
const EXPIRED: &[u8] = include_bytes!("clock/expired.pem");
const EARLY: &[u8] = include_bytes!("clock/early.pem");

/// Path of a kubeconfig for a server of TLS, which runs until the test program ends. The client trusts its certificate
/// but for the dates.
fn serve(folder: &Path, certificate: &'static [u8]) -> String {
    let chain = vec![CertificateDer::from_pem_slice(certificate).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(KEY).unwrap();
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut connection = ServerConnection::new(Arc::clone(&config)).unwrap();
            // It fails where the client refuses the certificate.
            while connection.is_handshaking() && connection.complete_io(&mut stream.as_ref().unwrap()).is_ok() {}
        }
    });
    let authority = folder.join("authority.pem");
    fs::write(&authority, certificate).unwrap();
    kubeconfig(folder, &format!("server: 'https://{address}', certificate-authority: '{}'", authority.display()))
}

#[test]
fn a_certificate_that_is_not_valid_at_this_nodes_time_names_the_clocks() {
    for (certificate, why) in [(EXPIRED, "certificate expired"), (EARLY, "certificate not valid yet")] {
        let folder = tempfile::tempdir().unwrap();
        let config = serve(folder.path(), certificate);
        let says_so = |line: &str| line.contains(why) && line.contains("compare the clocks of this node");
        let (code, line) = failed(&plugin().args(["list", "--kubeconfig", &config]).output().unwrap());
        assert_eq!(code, Some(4), "{line}");
        assert!(says_so(&line), "{line}");

        let [hooks, daemon, log] = ["hooks.sock", "control.sock", "log"].map(|name| folder.path().join(name));
        let mut command = agent();
        command.args(["--node", "n1", "--kubeconfig", &config, "--hooks", hooks.to_str().unwrap()]);
        command.args(["--daemon", daemon.to_str().unwrap()]).stderr(Stdio::from(fs::File::create(&log).unwrap()));
        let mut running = Running(command.spawn().unwrap());
        until("the agent's line", || fs::read_to_string(&log).unwrap().lines().any(says_so));
        until("the socket for hooks", || hooks.exists());
        assert!(running.0.try_wait().unwrap().is_none(), "the agent serves hooks all the same");
    }
}
