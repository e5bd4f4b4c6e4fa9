//! Input: text of the daemon's configuration file. Any text is parsed or refused with an error of one line; a parsed
//! configuration answers for every guest without settings of its own. Nothing outside this process is touched.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_control::protocol::Settings;
use wideleaf_daemon::config::Config;

fuzz_target!(|text: &str| match Config::parse(text) {
    Ok(config) => {
        let _ = config.budget.limits();
        let _ = config.attach.automatic.takes_domain("web-1", &Settings::default());
        for flavor in [None, Some("m1.large")] {
            config.wanted("web-1", flavor, &Settings::default()).expect("empty settings are valid");
        }
    }
    Err(mistake) => assert!(!mistake.to_string().trim_end().contains('\n'), "an error is one line: {mistake}"),
});
