"""Certificates and tokens: `slatemq certs` and `slatemq access`.

In reading order; a file imports only files above it:

`dev_certificates` A throwaway authority, and certificates that it signs: for development, not for
                   production
`certs`            `slatemq certs`: certificates for a stack on one machine
`policy_files`     What a policy file permits, judged here: by the code that the services load it
                   with
`token_files`      The files of tokens: that of the caller, and that of the services
`dev_access`       All that a local stack needs to run with TLS and a policy
`access`           `slatemq access`: tokens for callers, and what the policy permits them
"""
