region       = "eu-central-1"
environment  = "staging"
admins       = ["arn:aws:iam::000000000000:role/platform"]
api_cidrs    = ["203.0.113.7/32"] # yours: without it kubectl reaches the API from the VPC alone
zones        = 2
nat_per_zone = false
nodes        = { type = "m7i.xlarge", min = 2, max = 6 }
gpu_nodes    = { type = "g6.xlarge", max = 1 }
valkey       = { type = "cache.t4g.small", shards = 1, replicas = 1 }
kafka        = { type = "kafka.t3.small", brokers_per_zone = 1, gib = 20, secret_arns = ["arn:aws:secretsmanager:eu-central-1:000000000000:secret:AmazonMSK_reco"] }
database     = { type = "db.t4g.micro", gib = 20, standby = false }
